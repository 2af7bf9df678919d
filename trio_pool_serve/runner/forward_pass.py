"""A batch as tensors, and the model's output for it."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, frozen
from torch import Tensor

from trio_pool_serve.types import PoolingRequest, RenderedPrompt


@frozen(eq=False)
class ForwardPass:
    """Rows on the device, padded on the right to the longest.

    All tensors are [rows, tokens]: ``input_ids``, ``attention_mask`` and ``type_ids`` (int64), ``pooled`` (bool: the
    tokens that poolers pool), ``kept`` (bool: the tokens whose vectors leave the model). ``states`` is the backbone's
    output: [rows, tokens, hidden], or logits; ``None`` where no forward pass is needed.
    """

    requests: Sequence[PoolingRequest]
    input_ids: Tensor
    attention_mask: Tensor
    type_ids: Tensor
    pooled: Tensor
    kept: Tensor
    states: Tensor | None = None

    @property
    def required_states(self) -> Tensor:
        """``states``, for heads with ``reads_states``: they are never ``None`` there."""
        assert self.states is not None  # noqa: S101
        return self.states

    def with_states(self, states: Tensor) -> "ForwardPass":
        """Return the same rows with the backbone's output."""
        return evolve(self, states=states)

    def select(self, rows: Sequence[int]) -> "ForwardPass":
        """Return the rows at these indices, which may repeat; nothing is copied if they are all rows in order."""
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
    """Return requests as tensors on the device, without states."""
    prompts = [request.prompt for request in requests]
    tokens = np.array([len(prompt.token_ids) for prompt in prompts])
    attended = np.array([len(prompt.token_ids) if prompt.attended is None else prompt.attended for prompt in prompts])
    # Where the instruction is the whole input, it is pooled: there is nothing else.
    skipped = np.array([prompt.instruction_tokens for prompt in prompts])
    skipped[skipped >= tokens] = 0
    positions = np.arange(tokens.max())
    own = positions < tokens[:, None]
    # One buffer, so that there is one copy to the device instead of five: three int64 and two bools per cell.
    buffer = host_buffer(own.size * (3 * 8 + 2), device)
    array = buffer.numpy()
    ids, attention, types = array[: 3 * 8 * own.size].view(np.int64).reshape(3, *own.shape)
    pooled, kept = array[3 * 8 * own.size :].view(np.bool_).reshape(2, *own.shape)
    ids[:] = pad_token_id
    ids[own] = np.concatenate([prompt.token_ids for prompt in prompts])
    attention[:] = positions < attended[:, None]
    types[:] = 0
    if any(prompt.type_ids is not None for prompt in prompts):
        types[own] = np.concatenate([_or_zeros(prompt) for prompt in prompts])
    kept[:] = own
    np.logical_and(own, positions >= skipped[:, None], out=pooled)
    if any(prompt.kept is not None for prompt in prompts):
        kept[own] = np.concatenate([_or_all(prompt) for prompt in prompts])
    on_device = buffer.to(device, non_blocking=True)
    numbers = on_device[: 3 * 8 * own.size].view(torch.int64).view(3, *own.shape)
    flags = on_device[3 * 8 * own.size :].view(torch.bool).view(2, *own.shape)
    return ForwardPass(
        requests=requests,
        input_ids=numbers[0],
        attention_mask=numbers[1],
        type_ids=numbers[2],
        pooled=flags[0],
        kept=flags[1],
    )


def _or_zeros(prompt: RenderedPrompt) -> npt.NDArray[np.int32]:
    return np.zeros(len(prompt.token_ids), dtype=np.int32) if prompt.type_ids is None else prompt.type_ids


def _or_all(prompt: RenderedPrompt) -> npt.NDArray[np.bool_]:
    return np.ones(len(prompt.token_ids), dtype=np.bool_) if prompt.kept is None else prompt.kept


def host_buffer(size: int, device: torch.device) -> Tensor:
    """Return ``size`` uninitialised bytes on the host that can be copied to the device asynchronously.

    Pinned if the device is a GPU. torch reuses pinned memory for later buffers, but only once all copies from it are
    done, so batches in flight never share a buffer.
    """
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def overwrite_embeds(inputs: Tensor, requests: Sequence[PoolingRequest]) -> Tensor:
    """Overwrite rows of ``inputs`` [rows, tokens, width] with the token embeddings of the requests that have any."""
    for row, request in enumerate(requests):
        embeds = request.prompt.embeds
        if embeds is not None:
            inputs[row, : len(embeds)] = to_device(embeds, inputs.device)
    return inputs


def to_device(arrays: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Return an array as a tensor on the device, copied asynchronously; uint16 arrays hold bfloat16."""
    tensor = torch.from_numpy(arrays)
    if arrays.dtype == np.uint16:
        tensor = tensor.view(torch.bfloat16)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
