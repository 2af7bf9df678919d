"""The runner of transformers models: batches to forward passes, heads and output copies."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import Factory, evolve, frozen

from trio_pool_serve.errors import NotFiniteError, RunnerDeadError
from trio_pool_serve.runner.applied_adapters import Adapters
from trio_pool_serve.runner.batch_rows import ONE_LENGTH, of_one_length, short_row
from trio_pool_serve.runner.comparison import accepts_embeds, masks_padding, states_of
from trio_pool_serve.runner.device_memory import computed_or_out_of_memory, fit_budget
from trio_pool_serve.runner.forward_pass import Compute, ForwardPass, HeadRows
from trio_pool_serve.runner.loaded_model import LoadedModel, LoadingParams
from trio_pool_serve.runner.output_copy import OutputCopier
from trio_pool_serve.runner.padded_or_packed import Capture, Computation
from trio_pool_serve.runner.shared_cores import granted_threads
from trio_pool_serve.runner.torch_device import limit_memory, release_caches, use_device
from trio_pool_serve.types import (
    Batch,
    Classify,
    CopiedBatch,
    Embed,
    PooledBatch,
    PooledValue,
    PoolingParams,
    PoolingRequest,
    RenderedPrompt,
    RunnerFacts,
    SparseEmbed,
    SparseLookup,
    TokenClassify,
    TokenEmbed,
)

PROBED = (Embed, TokenEmbed, SparseEmbed, Classify, TokenClassify)
"""Params whose heads are tried with rows that are made up."""

PROBE_TOKENS, PADDED_TOKENS = 8, 5
"""Tokens of the longer and the shorter row. CANINE computes no row of fewer than four."""

PROBE_TOLERANCE = 1e-3
"""Relative; the probe's embeddings pass through float32 on the host, which is exact."""


@frozen(eq=False)
class HeadOutput:
    """One head's output for some rows; ``places`` are (row of the batch, index in that row's params)."""

    rows: HeadRows
    places: Sequence[tuple[int, int]]


@frozen(eq=False)
class TransformerRunner:
    """Computes batches with one backbone and its heads on one device.

    It is made in steps, each of which returns a runner that knows more of its ``facts``: ``warmed_up`` its heads and
    inputs, ``computing`` how batches are computed, and ``fitted`` their budget.
    """

    loaded: LoadedModel
    params: LoadingParams
    facts: RunnerFacts
    """Until ``fitted``, ``max_batch_tokens`` is the default for a model of this size on this device."""
    copier: OutputCopier | None = None
    """``None`` on a device that computes synchronously."""
    adapters: Adapters | None = None
    """``None``: rows with adapters are refused."""
    compute: Compute = Factory(lambda self: self.loaded.backbone, takes_self=True)
    """Computes the backbone's output: the backbone itself, or something faster whose output agrees."""
    capture: Capture | None = None
    masks_padding: bool = True
    """Otherwise only rows of one length are computed together."""

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PooledBatch:
        """Enqueue the forward pass and the output copy; on CPU, compute the rows.

        Raises ``RunnerDeadError`` once the CUDA context is lost, ``OutOfDeviceMemoryError``, and ``AdapterError``.
        """
        use_device(self.params.device)
        if self.facts.on_cpu:
            threads = granted_threads(torch.get_num_threads())
            if threads != torch.get_num_threads():
                torch.set_num_threads(threads)
        try:
            return computed_or_out_of_memory(partial(self._launch, batch), partial(release_caches, self.params.device))
        except torch.AcceleratorError as error:
            raise RunnerDeadError(f"the device failed: {error}") from error

    def _launch(self, batch: Batch) -> PooledBatch:
        with nullcontext() if self.adapters is None else self.adapters.applied(batch.adapter):
            outputs = self._compute(batch)
        tensors = [output.rows.tensor for output in outputs]
        tensors = [tensor.float() if tensor.is_floating_point() else tensor for tensor in tensors]
        split = _splitter(batch, outputs)
        if self.copier is None:
            return CopiedBatch(split([tensor.numpy() for tensor in tensors]))
        return self.copier.start(tensors, split)

    @torch.inference_mode()
    def warmed_up(self) -> "TransformerRunner":
        """Try the heads, and whether the model masks padding and accepts token embeddings; return the new runner."""
        facts = self.with_heads_tried().facts
        # Without the padding token: some models know it by its id and give it no position; embeddings have no id.
        ids = np.array([token for token in range(PROBE_TOKENS) if token != self.params.pad_token_id], dtype=np.int32)
        rows, backbone = (ids, ids[:PADDED_TOKENS]), self.loaded.backbone
        how: dict[str, Any] = {"pad_token_id": self.params.pad_token_id, "device": self.params.device}
        states = states_of(backbone, [*map(RenderedPrompt, rows)], **how)
        if backbone.embeds_width and accepts_embeds(backbone, backbone, rows, states, PROBE_TOLERANCE, **how):
            facts = evolve(facts, embeds_width=backbone.embeds_width)
        return evolve(self, facts=facts, masks_padding=masks_padding(backbone, rows, states, **how))

    def computing(self, computation: Computation, fingerprint: str) -> "TransformerRunner":
        """Return the runner with another way to compute, on which the heads are tried. Raises their errors."""
        about = computation.about if self.masks_padding else (*computation.about, ONE_LENGTH)
        facts = evolve(
            self.facts,
            pads=computation.pads,
            computation=about,
            improvements=tuple(filter(None, [computation.fuse])),
            computed_by=self.facts.computed_by._replace(fingerprint=fingerprint),
        )
        return evolve(self, compute=computation.compute, capture=computation.capture, facts=facts).with_heads_tried()

    @torch.inference_mode()
    def with_heads_tried(self) -> "TransformerRunner":
        """Compute a short row with each head; return the runner that knows ``dimensions`` and ``probe_request``."""
        prompt, probe, widths = short_row(self.params.pad_token_id), None, {}
        for param_type in PROBED:
            if param_type in self.loaded.heads:
                request = PoolingRequest(prompt, (param_type(),))
                (output,) = self._compute(Batch((request,)))
                self._require_finite(output.rows.tensor, request)
                probe = probe or request
                widths[param_type] = output.rows.tensor.shape[-1]
        dimensions = widths.get(Embed) or widths.get(TokenEmbed) or 0
        return evolve(self, facts=evolve(self.facts, dimensions=dimensions, probe_request=probe))

    def _require_finite(self, output: torch.Tensor, request: PoolingRequest) -> None:
        if not output.isfinite().all():
            module = self.loaded.backbone.first_not_finite(
                ForwardPass([request], self.params.pad_token_id, self.params.device)
            )
            where = f" from {module} on" if module else ""
            raise NotFiniteError(f"its output contains infinities or NaN{where}, although its weights contain none")

    def return_memory(self) -> None:
        """Do nothing: torch caches no memory on CPU, and a GPU's memory is for batches."""

    def fitted(
        self, wanted_batch_tokens: int | None, share: Callable[[Callable[[], int]], int] | None = None
    ) -> "TransformerRunner":
        """Return the runner with the token budget of its batches, by default the one that suits the device.

        On a GPU, this computes full batches, and captures graphs for batches up to the budget, with no more memory than
        the ``share``. Blocks. Raises ``ModelLoadError``.
        """
        budget = wanted_batch_tokens or self.facts.max_batch_tokens
        about = self.facts.computation
        if not self.facts.on_cpu:
            granted = limit_memory(self.params.device, share) if share else ""
            params = tuple(kind() for kind in PROBED if kind in self.loaded.heads)
            fit = partial(fit_budget, self._compute_all, max_tokens=self.params.max_tokens, params=params)
            budget = fit(budget)
            captured = ""
            if self.capture is not None:
                captured = self.capture(budget)
                while fit(budget) < budget:  # graphs take memory, too
                    budget //= 2
                    captured = self.capture(budget)
            about = (*about, *filter(None, [captured, granted]), f"batches of {budget} tokens")
        return evolve(self, facts=evolve(self.facts, max_batch_tokens=budget, computation=about))

    def _compute_all(self, batches: Sequence[Batch]) -> None:
        handles = [self.launch(batch) for batch in batches]
        torch.get_device_module(self.params.device).synchronize(self.params.device)
        del handles

    def _compute(self, batch: Batch) -> list[HeadOutput]:
        """Return the heads' outputs, on the device. Rows that only look up weights of tokens have no forward pass."""
        forward = ForwardPass(batch.requests, self.params.pad_token_id, self.params.device)
        rows: Sequence[int] = range(len(batch.requests))
        outputs: list[HeadOutput] = []
        if SparseLookup in _kinds_of(batch.requests):
            lookups = [row for row in rows if _kinds_of([batch.requests[row]]) == {SparseLookup}]
            outputs += self._apply_heads(forward.select(lookups), lookups) if lookups else []
            rows = sorted(set(rows) - set(lookups))
        for together in [rows] if self.masks_padding and rows else of_one_length(batch.requests, rows):
            some = forward.select(together)
            outputs += self._apply_heads(evolve(some, states=self.compute(some)), together)
        return outputs

    def _apply_heads(self, forward: ForwardPass, rows: Sequence[int]) -> list[HeadOutput]:
        """Apply each head to the rows that request it; ``rows`` are the indices in the batch of ``forward``'s rows."""
        requests = forward.requests
        kinds = _kinds_of(requests)
        if len(kinds) == 1 and all(len(request.params) == 1 for request in requests):
            params = [request.params[0] for request in requests]
            return [HeadOutput(self.loaded.heads[kinds.pop()](forward, params), [(row, 0) for row in rows])]
        requested: dict[type[Any], list[tuple[int, int, PoolingParams]]] = {}
        for position, request in enumerate(requests):
            for index, param in enumerate(request.params):
                requested.setdefault(type(param), []).append((position, index, param))
        return [
            HeadOutput(
                self.loaded.heads[kind](
                    forward.select([position for position, _, _ in uses]), [param for *_, param in uses]
                ),
                [(rows[position], index) for position, index, _ in uses],
            )
            for kind, uses in requested.items()
        ]


def _kinds_of(requests: Sequence[PoolingRequest]) -> set[type[Any]]:
    return {type(param) for request in requests for param in request.params}


def _splitter(
    batch: Batch, outputs: Sequence[HeadOutput]
) -> Callable[[Sequence[npt.NDArray[np.float32]]], list[tuple[PooledValue, ...]]]:
    """Return a function, without references to tensors, that splits the heads' arrays on the host into rows."""
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
