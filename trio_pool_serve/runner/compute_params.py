"""What a computation is chosen for."""

import torch
from attrs import frozen


@frozen(kw_only=True, eq=False)
class ComputeParams:
    """Device, dtype, and the rows: at most ``max_tokens`` tokens each, padded with ``pad_token_id``.

    At most ``concurrent_launches`` batches are computed at a time here, and ``cores_shared_by`` on these cores, other
    processes included.
    """

    device: torch.device
    dtype: torch.dtype
    pad_token_id: int
    max_tokens: int
    concurrent_launches: int = 1
    cores_shared_by: int = 1
