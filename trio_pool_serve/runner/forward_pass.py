"""A batch as tensors, and what the model made of it."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, frozen
from torch import Tensor

from trio_pool_serve.types import PoolingRequest


@frozen(eq=False)
class ForwardPass:
    """Some requests on the device, each padded on the right to the longest.

    All tensors are [rows, tokens]: ``input_ids``, ``attention_mask`` and ``type_ids`` (int64), ``pooled``
    (bool: what one-vector poolers look at), ``kept`` (bool: the tokens whose own vectors are wanted).
    ``states`` is the model's output, [rows, tokens, hidden] or whatever its own head makes of that; it is
    absent where no forward pass was needed.
    """

    requests: Sequence[PoolingRequest]
    input_ids: Tensor
    attention_mask: Tensor
    type_ids: Tensor
    pooled: Tensor
    kept: Tensor
    states: Tensor | None = None

    @property
    def computed(self) -> Tensor:
        """``states``, which are there for whoever said that they are read."""
        assert self.states is not None  # noqa: S101
        return self.states

    def with_states(self, states: Tensor) -> "ForwardPass":
        """Return the same requests with the model's output."""
        return evolve(self, states=states)

    def select(self, rows: Sequence[int]) -> "ForwardPass":
        """Return some of the rows, or one several times; all of them are returned without copying anything."""
        if list(rows) == list(range(len(self.requests))):
            return self
        index = torch.tensor(rows).to(self.input_ids.device, non_blocking=True)
        return ForwardPass(
            [self.requests[row] for row in rows],
            self.input_ids[index],
            self.attention_mask[index],
            self.type_ids[index],
            self.pooled[index],
            self.kept[index],
            None if self.states is None else self.states[index],
        )


def assemble(requests: Sequence[PoolingRequest], *, pad_token_id: int, device: torch.device) -> ForwardPass:
    """Return requests as tensors on the device, not computed yet."""
    prompts = [request.prompt for request in requests]
    tokens = np.array([len(prompt.token_ids) for prompt in prompts])
    attended = np.array([len(prompt.token_ids) if prompt.attended is None else prompt.attended for prompt in prompts])
    # An instruction that fills the whole input leaves nothing else to pool.
    skipped = np.array([prompt.instruction_tokens for prompt in prompts])
    skipped[skipped >= tokens] = 0
    positions = np.arange(tokens.max())
    # Two arrays, so that there are two copies to the device and not five.
    numbers = np.empty((3, len(prompts), len(positions)), dtype=np.int64)
    flags = np.empty((2, len(prompts), len(positions)), dtype=np.bool_)
    (ids, attention, types), (pooled, kept) = numbers, flags
    ids[:] = pad_token_id
    types[:] = 0
    attention[:] = positions < attended[:, None]
    kept[:] = positions < tokens[:, None]
    pooled[:] = kept & (positions >= skipped[:, None])
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt.token_ids)] = prompt.token_ids
        if prompt.type_ids is not None:
            types[row, : len(prompt.type_ids)] = prompt.type_ids
        if prompt.kept is not None:
            kept[row, : len(prompt.kept)] = prompt.kept
    return ForwardPass(requests, *to_device(numbers, device), *to_device(flags, device))


def overwrite_embeds(inputs: Tensor, requests: Sequence[PoolingRequest]) -> Tensor:
    """Put the embeddings that came with requests in place of those of their ids, in [rows, tokens, width]."""
    for row, request in enumerate(requests):
        embeds = request.prompt.embeds
        if embeds is not None:
            inputs[row, : len(embeds)] = to_device(embeds, inputs.device)
    return inputs


def to_device(arrays: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Return an array as a tensor on the device, copied without waiting for it; uint16 hold bfloat16."""
    tensor = torch.from_numpy(arrays)
    if arrays.dtype == np.uint16:
        tensor = tensor.view(torch.bfloat16)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
