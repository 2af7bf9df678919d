"""``trio-pool-serve`` on a CPU that is said to compute bfloat16 natively: OpenVINO computes it on any, if slowly."""

import torch

from trio_pool_serve.cli import main

torch.cpu._is_avx512_bf16_supported = lambda: True  # type: ignore[assignment]

if __name__ == "__main__":
    main()
