"""The runner of converted models: batches to one graph, and its outputs to values. It needs no torch."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from attrs import Factory, field, frozen

from trio_pool_serve.runner.batch_rows import Rows, of_one_length, short_row
from trio_pool_serve.runner.device_memory import computed_or_out_of_memory
from trio_pool_serve.runner.openvino.converted_model import GRAPH, MODULES, TABLE, ConvertedModel
from trio_pool_serve.runner.openvino.graph_adapters import GraphAdapters
from trio_pool_serve.runner.openvino.heads import PARAMS, Floats, Head, Outputs
from trio_pool_serve.runner.openvino.programs import CompileParams, Program, Programs, read_graph
from trio_pool_serve.types import (
    Batch,
    CopiedBatch,
    PooledBatch,
    PooledValue,
    PoolingParams,
    PoolingRequest,
    RenderedPrompt,
    Runner,
    RunnerFacts,
)


@frozen(eq=False)
class OpenVinoRunner:
    """Computes a converted model's batches on CPU. Its threads are OpenVINO's, and hold no interpreter lock."""

    model: ConvertedModel
    programs: Programs
    facts: RunnerFacts
    modules: Program | None = None
    table: Floats | None = None
    for_embeds: Runner | None = None
    """Computes rows of token embeddings; ``None``: they are not accepted."""
    adapters: GraphAdapters | None = None
    """``None``: rows with adapters are refused."""
    heads: Mapping[type[PoolingParams], Head] = field(
        init=False,
        default=Factory(lambda self: {PARAMS[name]: head for name, head in self.model.heads.items()}, takes_self=True),
    )

    @classmethod
    def of_folder(cls, folder: Path, model: ConvertedModel, params: CompileParams, **about: Any) -> "OpenVinoRunner":
        """Return the runner of the conversion in a folder. Blocks for a second.

        ``about`` are facts that the conversion does not have. Raises ``RuntimeError``, as OpenVINO does, for files that
        are not its own.
        """
        programs = Programs(folder / GRAPH, params)
        compiled_for = params.precision, params.streams, params.streams
        modules = Program(read_graph(folder / MODULES), *compiled_for) if (folder / MODULES).exists() else None
        table = np.load(folder / TABLE, allow_pickle=False) if (folder / TABLE).exists() else None
        probe = PoolingRequest(short_row(model.pad_token_id), (model.compared[0],)) if model.compared else None
        facts = RunnerFacts(
            max_batch_tokens=model.default_batch_tokens,
            concurrent_launches=params.streams,
            background_launches=params.idle_streams,
            has_own_threads=True,
            probe_request=probe,
            dimensions=model.dimensions,
            cosine_with_float32=model.mean_cosine,
            why_float32=model.why_float32,
            device="cpu",
            parameters=model.parameters,
            weight_bytes=model.weight_bytes,
            heads=model.about_heads,
            **about,
        )
        return cls(model, programs, facts, modules, table)

    def launch(self, batch: Batch) -> PooledBatch:
        """Compute the rows.

        Raises ``OutOfDeviceMemoryError``, ``AdapterError``, or ``RuntimeError`` for other errors of OpenVINO.
        """
        return CopiedBatch(computed_or_out_of_memory(partial(self._compute_all, batch.requests)))

    def _compute_all(self, requests: Sequence[PoolingRequest]) -> list[tuple[PooledValue, ...]]:
        """Return the rows' values. Rows of token embeddings are computed by torch."""
        embedded = [row for row, request in enumerate(requests) if request.prompt.embeds is not None]
        if not embedded:
            return self._compute(requests)
        if self.for_embeds is None:  # another engine of the model may accept them
            raise ValueError("this engine does not accept token embeddings; start it with --enable-prompt-embeds")
        by_torch = self.for_embeds.launch(Batch(tuple(requests[row] for row in embedded)))
        assert isinstance(by_torch, CopiedBatch)  # noqa: S101  (on CPU)
        return self._with_others(requests, embedded, by_torch.rows)

    def _with_others(
        self, requests: Sequence[PoolingRequest], done: Sequence[int], values: Sequence[tuple[PooledValue, ...]]
    ) -> list[tuple[PooledValue, ...]]:
        """Return the values of all rows; compute the rows that are not ``done``."""
        others = sorted(set(range(len(requests))) - set(done))
        of_others = self._compute([requests[row] for row in others]) if others else []
        found = dict(zip([*done, *others], [*values, *of_others], strict=True))
        return [found[row] for row in range(len(requests))]

    def _compute(self, requests: Sequence[PoolingRequest]) -> list[tuple[PooledValue, ...]]:
        """Return the values of rows of token ids. Rows that only look up weights of tokens have no forward pass."""
        looked_up = [
            row
            for row, request in enumerate(requests)
            if not [param for param in request.params if self.heads[type(param)].output]
        ]
        if looked_up:
            values = self._values(Outputs([requests[row] for row in looked_up], table=self.table))
            return self._with_others(requests, looked_up, values)
        if not self.model.masks_padding:
            rows = of_one_length(requests, range(len(requests)))[0]
            if len(rows) < len(requests):
                return self._with_others(requests, rows, self._compute([requests[row] for row in rows]))
        padded = Rows(requests, self.model.pad_token_id)
        first = requests[0]
        programs, factors = self.programs, dict[str, ov.Tensor]()
        if self.adapters is not None and first.adapter is not None:
            programs, factors = self.adapters.of(first.adapter)
        program = programs.choose(is_planned=first.planned is not None)
        return program(
            {**padded.arrays([name for name in program.inputs if name not in factors]), **factors},
            lambda arrays: self._values(Outputs(requests, arrays, self._after_pooling, self.table)),
        )

    def _after_pooling(self, vectors: Floats) -> Floats:
        if self.modules is None:
            return vectors
        return self.modules({"pooled": vectors}, lambda arrays: arrays["vectors"].copy())

    def _values(self, outputs: Outputs) -> list[tuple[PooledValue, ...]]:
        """Return a tuple for each row, with a value for each of its params; each head computes its rows at once."""
        requests = outputs.requests
        params = [param for request in requests for param in request.params]
        if len(params) == len(requests) and len({*map(type, params)}) == 1:
            return [(value,) for value in self.heads[type(params[0])].values(outputs, range(len(requests)), params)]
        return [
            tuple([self.heads[type(param)].values(outputs, [row], [param])[0] for param in request.params])
            for row, request in enumerate(requests)
        ]

    def value_of(self, prompt: RenderedPrompt) -> PooledValue:
        """Return the value of a row for the first of the params that are compared."""
        ((value,),) = self._compute([PoolingRequest(prompt, (self.model.compared[0],))])
        return value

    def return_memory(self) -> None:
        """Return the memory of OpenVINO's largest pass, and pages of the weights."""
        self.programs.return_memory()
        if self.adapters is not None:
            self.adapters.return_memory()
        if self.modules is not None:
            self.modules.compiled.return_memory()
