"""``trio-pool-serve`` on a CPU that is said to compute bfloat16 natively: OpenVINO computes it on any, if slowly."""

from trio_pool_serve.cli import main
from trio_pool_serve.runner import cpu_features

NATIVE_FLAGS = frozenset({"avx512_bf16", "avx512_vnni"})

if __name__ == "__main__":
    cpu_features._flags = lambda: NATIVE_FLAGS  # type: ignore[assignment]
    main()
