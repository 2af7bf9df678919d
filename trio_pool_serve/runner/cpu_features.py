"""Features of this machine's CPU, found without torch."""

from functools import cache
from pathlib import Path

from trio_pool_serve.config import Dtype
from trio_pool_serve.errors import require


@cache
def _cpuinfo(name: str) -> str:
    """Return the entry of that name for the first CPU in Linux's /proc/cpuinfo; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def cpu_name() -> str:
    """Return the name of the CPU's model; empty if it is unknown."""
    return _cpuinfo("model name")


def _flags() -> set[str]:
    """Return Linux's names of the CPU's features; none elsewhere."""
    return set(_cpuinfo("flags").split())


def has_native_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16 natively: AVX512-BF16 or AMX."""
    return not _flags().isdisjoint({"avx512_bf16", "amx_tile"})


def saturates_int8() -> bool:
    """Return whether sums of products of int8 overflow: without VNNI, in pairs, at 16 bits."""
    return _flags().isdisjoint({"avx512_vnni", "avx_vnni"})


def dtype_on_cpu(name: Dtype) -> str:
    """Return the dtype to load weights in for ``--dtype``; for int8 they are quantised after loading.

    float16 is as ``auto``: even on a CPU that multiplies it natively (AVX512-FP16) it takes 0.9 to 1.4 times as long as
    float32, and bfloat16 0.3 to 0.6 times (MiniLM, 1 to 64 rows, by OpenVINO and by torch). Raises ``ModelLoadError``
    for fp8.
    """
    require(
        name != "fp8",
        "--dtype fp8 is for GPUs with compute capability 8.9 or higher, not for a CPU; "
        "accepted on CPU: auto, float32, bfloat16, int8.",
    )
    if name in ("auto", "float16"):
        return "bfloat16" if has_native_bfloat16() else "float32"
    return "float32" if name == "int8" else name
