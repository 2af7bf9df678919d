"""``trio-pool-serve`` on a CPU that is said to compute bfloat16 natively: OpenVINO computes it on any, if slowly."""

from trio_pool_serve.cli import main
from trio_pool_serve.runner import cpu_features

cpu_features._flags = lambda: frozenset({"avx512_bf16", "avx512_vnni"})  # type: ignore[assignment]

if __name__ == "__main__":
    main()
