"""What a computation is chosen for."""

import torch
from attrs import frozen


@frozen(kw_only=True, eq=False)
class ComputeParams:
    """Device, dtype, and the rows: at most ``max_tokens`` tokens each, padded with ``pad_token_id``."""

    device: torch.device
    dtype: torch.dtype
    pad_token_id: int
    max_tokens: int
