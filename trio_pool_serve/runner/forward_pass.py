"""A forward pass: its rows and images as tensors for the backbone, and the interface of heads."""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, frozen
from torch import Tensor

from trio_pool_serve.runner.batch_rows import Indices, Rows, RowState
from trio_pool_serve.runner.row_states import RowStates
from trio_pool_serve.runner.torch_device import host_buffer, to_device
from trio_pool_serve.types import ImageFeatures, PooledValue, PoolingRequest


@frozen(eq=False)
class ForwardPass(Rows):
    """Rows that are computed together on ``device``.

    ``states`` is the backbone's output for them; ``None`` before it is computed, and where no head needs it.
    """

    device: torch.device
    states: RowStates | None = None

    @cached_property
    def padded(self) -> Tensor:
        """The rows' ids, masks and segments, padded on the right to the longest: int64, [3, rows, tokens].

        One buffer, so that there is one copy to the device instead of three, when they are first used.
        """
        arrays = [self.ids(), self.mask(), self.segments()]
        shape = len(arrays), *self.is_token.shape
        buffer = host_buffer(8 * math.prod(shape), self.device)
        np.stack(arrays, out=buffer.numpy().view(np.int64).reshape(shape))
        return buffer.to(self.device, non_blocking=True).view(torch.int64).view(shape)

    @property
    def has_embeds(self) -> bool:
        """Whether token embeddings stand in place of the ids of some rows."""
        return any(request.prompt.embeds is not None for request in self.requests)

    @property
    def has_adapter(self) -> bool:
        """Whether hooks add an adapter to the model's weights."""
        return self.requests[0].adapter is not None

    @property
    def input_ids(self) -> Tensor:
        """Padded ids, [rows, tokens] int64."""
        return self.padded[0]

    @property
    def attention_mask(self) -> Tensor:
        """1 for tokens that are attended to, else 0: [rows, tokens] int64."""
        return self.padded[1]

    @property
    def type_ids(self) -> Tensor:
        """Segments, [rows, tokens] int64."""
        return self.padded[2]

    @property
    def required_states(self) -> RowStates:
        """``states``, for heads that read them: they are never ``None`` there."""
        assert self.states is not None  # noqa: S101
        return self.states

    def row_states(self, which: RowState) -> Tensor:
        """Return one state of each row, [rows, hidden]."""
        states = self.required_states
        if which == "whole_mean":
            return states.means(np.zeros_like(self.lengths))
        return states.at(states.begins + (self.attended - 1 if which == "last_attended" else 0))

    def kept_states(self) -> tuple[Tensor, Indices]:
        """Return the states of the kept tokens of all rows, [tokens, width], and the number of each row's.

        A copy, unless all tokens are kept and packed.
        """
        states = self.required_states
        if all(request.prompt.kept is None for request in self.requests):
            return states.at(states.cells), states.lengths
        prompts = [request.prompt for request in self.requests]
        kept = [np.ones(len(one.token_ids), dtype=np.bool_) if one.kept is None else one.kept for one in prompts]
        return self.states_where(kept)

    def states_where(self, chosen: Sequence[npt.NDArray[np.bool_]]) -> tuple[Tensor, Indices]:
        """Return the states of the chosen tokens of all rows, [tokens, width], and the number of each row's."""
        states = self.required_states
        counts = np.array([np.count_nonzero(of_row) for of_row in chosen])
        return states.at(states.cells[np.concatenate(chosen)]), counts

    def select(self, rows: Sequence[int]) -> "ForwardPass":
        """Return the rows at these indices, which may repeat; nothing is copied."""
        if list(rows) == list(range(len(self.requests))):
            return self
        states = None if self.states is None else self.states.select(rows)
        return evolve(self, requests=[self.requests[row] for row in rows], states=states)


def overwrite_embeds(inputs: Tensor, requests: Sequence[PoolingRequest]) -> Tensor:
    """Overwrite rows of ``inputs`` [rows, tokens, width] with the token embeddings of the requests that have any."""
    for row, request in enumerate(requests):
        embeds = request.prompt.embeds
        if embeds is not None:
            inputs[row, : len(embeds)] = to_device(embeds, inputs.device)
    return inputs


Compute: TypeAlias = Callable[[ForwardPass], RowStates]
"""Maps rows to a backbone's output."""


def images_of(requests: Sequence[PoolingRequest]) -> list[ImageFeatures]:
    """Return the images of the requests that have any, in order."""
    return [request.prompt.images for request in requests if request.prompt.images is not None]


def require_placeholders(requests: Sequence[PoolingRequest], token_id: int) -> None:
    """Raise ``ValueError`` unless each row has a placeholder for each position of its images.

    A model that finds another number of them on a GPU ends the process instead.
    """
    for request in requests:
        prompt = request.prompt
        places = 0 if prompt.images is None else sum(prompt.images.tokens)
        if prompt.embeds is None and np.count_nonzero(prompt.token_ids == token_id) != places:
            raise ValueError(f"an input must contain {places} placeholders for its images")


def image_inputs(images: Sequence[ImageFeatures], *, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the arrays of all images on the device, concatenated along their first dimension.

    Floating-point arrays (pixels) are converted to ``dtype``; the others (grids, masks) stay integers.
    """
    inputs = {}
    for name in images[0].arrays:
        tensor = to_device(joined(images, name), device)
        inputs[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return inputs


def joined(images: Sequence[ImageFeatures], name: str) -> npt.NDArray[Any]:
    """Return one array of all images, concatenated along its first dimension."""
    parts = [image.arrays[name] for image in images]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


HostArray = npt.NDArray[Any]
"""A head's output on the host: float32, or int32 if the head returned int32."""


@frozen(eq=False)
class HeadRows:
    """A head's output on the device, and the function that splits it once it is on the host.

    ``tensor`` has floating-point numbers, which are copied as float32, or int32. ``split`` takes it as an array of the
    same shape and returns one value per row; it may run in any thread, and may block for a further copy.
    """

    tensor: Tensor
    split: Callable[[HostArray], list[PooledValue]]


Head: TypeAlias = Callable[[ForwardPass, Sequence[Any]], HeadRows]
"""Computes one kind of output for rows of a batch; the params, one for each row, are of the class that it serves.

It enqueues work on the current stream without waiting for it.
"""
