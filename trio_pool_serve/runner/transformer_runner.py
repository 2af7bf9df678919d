"""The runner for transformers models."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import Factory, define, field, frozen

from trio_pool_serve.errors import RunnerDeadError
from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.copied_batch import CopiedBatch
from trio_pool_serve.runner.forward_pass import ForwardPass, assemble
from trio_pool_serve.runner.heads.head import Head, HeadRows
from trio_pool_serve.runner.heads.maxsim import HeldMemory, QueryVectors
from trio_pool_serve.runner.output_copy import OutputCopier
from trio_pool_serve.runner.probe import Compute
from trio_pool_serve.types import (
    Batch,
    Classify,
    Embed,
    PooledBatch,
    PooledValue,
    PoolingParams,
    PoolingRequest,
    QueryScope,
    RenderedPrompt,
    SparseEmbed,
    TokenClassify,
    TokenEmbed,
)

Heads = Mapping[type[Any], Head]
"""What a model can be asked for, by the class of the ``PoolingParams``."""

PROBE_TOKENS = 8

PROBE_TOLERANCE = 1e-3
"""Relative. Embeddings leave the device as float32, which holds them exactly, and come back."""


@frozen(eq=False)
class HeadOutput:
    """What one head made of some rows: ``places`` are (row of the batch, index in that row's params)."""

    rows: HeadRows
    places: Sequence[tuple[int, int]]


@define(eq=False)
class TransformerRunner:
    """A model, its heads, and one device.

    ``copier`` is ``None`` where the device computes synchronously. ``batch_tokens`` is what suits a model
    of this size on this device.
    """

    backbone: Backbone
    heads: Heads
    device: torch.device
    pad_token_id: int
    default_batch_tokens: int
    copier: OutputCopier | None = None
    compute: Compute = Factory(lambda self: self.backbone, takes_self=True)
    """How ``backbone`` is computed: by itself, or by something faster that gives the same."""
    pads: bool = True
    """Whether padding is computed like tokens are."""
    dimensions: int = field(default=0, init=False)
    """Length of the vectors; known after ``warm_up``, 0 for a model that makes none."""
    embeds_width: int = field(default=0, init=False)
    """Of the embeddings taken in place of token ids; known after ``warm_up``, 0 for a model that takes none."""
    description: str = field(default="", init=False)
    _memory: HeldMemory = field(init=False, factory=HeldMemory)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PooledBatch:
        """Enqueue the forward pass and the copy of its rows; on a processor, compute them.

        Raises ``RunnerDeadError`` once the CUDA context is lost.
        """
        try:
            outputs = self._compute(batch)
            tensors = [output.rows.tensor.float() for output in outputs]
            split = _splitter(batch, outputs)
            if self.copier is None:
                return CopiedBatch(split([tensor.numpy() for tensor in tensors]))
            return self.copier.start(tensors, split)
        except torch.OutOfMemoryError:
            raise
        except torch.AcceleratorError as error:
            raise RunnerDeadError(f"the device failed: {error}") from error

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compute one short batch with everything the model can be asked for, and learn the vectors' length."""
        no_padding = int(self.pad_token_id == 0)  # the padding token may be the vocabulary's last
        prompt = RenderedPrompt(np.full(8, no_padding, dtype=np.int32))
        widths = {}
        for kind in (Embed, TokenEmbed, SparseEmbed, Classify, TokenClassify):
            if kind in self.heads:
                (output,) = self._compute(Batch((PoolingRequest(prompt, (kind(),)),)))
                widths[kind] = output.rows.tensor.shape[-1]
        self.dimensions = widths.get(Embed) or widths.get(TokenEmbed) or 0
        if self._reads_embeds_as_ids():
            self.embeds_width = self.backbone.embeds_width

    def _reads_embeds_as_ids(self) -> bool:
        """Compare rows of ids with the same rows as embeddings: some models look at the ids for more than those."""
        if not self.backbone.embeds_width:
            return False
        # Padding among the tokens is counted as none by some models: no embedding is that.
        ids = np.array([token for token in range(PROBE_TOKENS) if token != self.pad_token_id], dtype=np.int32)
        embeds = self.backbone.embed(torch.from_numpy(ids.astype(np.int64)).to(self.device)).float().cpu().numpy()
        lengths = (len(ids), len(ids) // 2)
        of_ids = [RenderedPrompt(ids[:length]) for length in lengths]
        of_embeds = [RenderedPrompt(np.zeros(length, dtype=np.int32), embeds=embeds[:length]) for length in lengths]
        try:
            expected, ours = self._probe(of_ids), self._probe(of_embeds)
        except (RuntimeError, ValueError, TypeError, AttributeError):
            return False
        return bool((ours - expected).norm() <= PROBE_TOLERANCE * expected.norm())

    def _probe(self, prompts: Sequence[RenderedPrompt]) -> torch.Tensor:
        """Return all that the backbone says of prompts, what it says of padding left out."""
        requests = [PoolingRequest(prompt) for prompt in prompts]
        forward = assemble(requests, pad_token_id=self.pad_token_id, device=self.device)
        output = self.backbone(forward).float()
        return output[forward.kept] if output.dim() == 3 else output

    def describe(self) -> str:
        """One line for people."""
        return self.description

    def open_scope(self) -> QueryScope:
        """Return a new place for queries' vectors."""
        return QueryVectors(self._memory)

    @property
    def held_bytes(self) -> int:
        """Bytes of the device that open scopes hold."""
        return self._memory.bytes

    def _compute(self, batch: Batch) -> list[HeadOutput]:
        """Return what was asked for, on the device. Rows that no head needs states of are not forwarded."""
        reading: list[int] = []
        lookups: list[int] = []
        for row, request in enumerate(batch.requests):
            reads = any(self.heads[type(param)].reads_states for param in request.params)
            (reading if reads else lookups).append(row)
        outputs: list[HeadOutput] = []
        if reading:
            forward = self._assemble(batch, reading)
            outputs += self._apply_heads(forward.with_states(self.compute(forward)), reading)
        if lookups:
            outputs += self._apply_heads(self._assemble(batch, lookups), lookups)
        return outputs

    def _assemble(self, batch: Batch, rows: Sequence[int]) -> ForwardPass:
        requests = [batch.requests[row] for row in rows]
        return assemble(requests, pad_token_id=self.pad_token_id, device=self.device)

    def _apply_heads(self, forward: ForwardPass, rows: Sequence[int]) -> list[HeadOutput]:
        """Give each head the rows that ask for it; ``rows`` are where those of ``forward`` are in the batch."""
        asked: dict[type[Any], list[tuple[int, int, PoolingParams]]] = {}
        for position, request in enumerate(forward.requests):
            for index, param in enumerate(request.params):
                asked.setdefault(type(param), []).append((position, index, param))
        return [
            HeadOutput(
                self.heads[kind](forward.select([position for position, _, _ in asks]), [param for *_, param in asks]),
                [(rows[position], index) for position, index, _ in asks],
            )
            for kind, asks in asked.items()
        ]


def _splitter(
    batch: Batch, outputs: Sequence[HeadOutput]
) -> Callable[[Sequence[npt.NDArray[np.float32]]], list[tuple[PooledValue, ...]]]:
    """Return what takes the heads' arrays, on the host, apart into the batch's rows; it holds no tensors."""
    parts = [(output.rows.split, output.places) for output in outputs]

    def split(arrays: Sequence[npt.NDArray[np.float32]]) -> list[tuple[PooledValue, ...]]:
        if len(parts) == 1 and all(len(request.params) == 1 for request in batch.requests):
            return [(value,) for value in parts[0][0](arrays[0])]
        values: list[dict[int, PooledValue]] = [{} for _ in batch.requests]
        for (values_of, places), array in zip(parts, arrays, strict=True):
            for (row, index), value in zip(places, values_of(array), strict=True):
                values[row][index] = value
        return [tuple(of_row[index] for index in sorted(of_row)) for of_row in values]

    return split
