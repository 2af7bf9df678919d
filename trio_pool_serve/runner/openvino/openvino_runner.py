"""The runner of converted models: batches to one graph, and its outputs to values. It needs no torch."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import openvino as ov
from attrs import Factory, define, field

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.processes.allocator import resident_bytes
from trio_pool_serve.runner.batch_rows import Rows, of_one_length
from trio_pool_serve.runner.device_memory import computed_or_out_of_memory
from trio_pool_serve.runner.openvino.converted_model import COMPARED, GRAPH, MODULES, TABLE, ConvertedModel
from trio_pool_serve.runner.openvino.graph_adapters import GraphAdapters
from trio_pool_serve.runner.openvino.heads import PARAMS, Floats, Head, Outputs
from trio_pool_serve.runner.openvino.programs import CompileParams, Program, Programs, read_graph
from trio_pool_serve.runner.runner_description import RunnerDescription
from trio_pool_serve.types import (
    Batch,
    CopiedBatch,
    PooledBatch,
    PooledValue,
    PoolingParams,
    PoolingRequest,
    RenderedPrompt,
    Runner,
)

logger = logging.getLogger(__name__)


@define(eq=False)
class OpenVinoRunner:
    """Computes a converted model's batches on CPU. Its threads are OpenVINO's, and hold no interpreter lock."""

    model: ConvertedModel
    programs: Programs
    description: RunnerDescription | None = None
    modules: Program | None = None
    table: Floats | None = None
    for_embeds: Runner | None = None
    """Computes rows of token embeddings; ``None``: they are not accepted."""
    load_by_torch: Callable[[], Runner] | None = None
    adapters: GraphAdapters | None = None
    """``None``: rows with adapters are refused."""
    heads: Mapping[type[PoolingParams], Head] = field(
        init=False,
        default=Factory(lambda self: {PARAMS[name]: head for name, head in self.model.heads.items()}, takes_self=True),
    )

    on_cpu = has_own_threads = pads = True

    @classmethod
    def of_folder(
        cls, folder: Path, model: ConvertedModel, params: CompileParams, description: RunnerDescription | None = None
    ) -> "OpenVinoRunner":
        """Return the runner of the conversion in a folder. Blocks for a second.

        Raises ``RuntimeError``, as OpenVINO does, for files that are not its own.
        """
        programs = Programs(folder / GRAPH, params)
        modules = None
        if (folder / MODULES).exists():
            modules = Program(read_graph(folder / MODULES), params.precision, params.streams, params.streams)
        table = np.load(folder / TABLE, allow_pickle=False) if (folder / TABLE).exists() else None
        return cls(model, programs, description, modules, table)

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
            if not any(self.heads[type(param)].output for param in request.params)
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
            tuple(self.heads[type(param)].values(outputs, [row], [param])[0] for param in request.params)
            for row, request in enumerate(requests)
        ]

    # -- properties of the model --------------------------------------------------------------------------

    @property
    def compared(self) -> list[PoolingParams]:
        """The params in ``COMPARED`` for which it has a head."""
        return [params for params in COMPARED if type(params) in self.heads]

    def describe(self) -> str:
        """Return one line for the log."""
        return "" if self.description is None else str(self.description)

    @property
    def dimensions(self) -> int:
        """Length of the vectors; 0 for a model without any."""
        return self.model.dimensions

    @property
    def embeds_width(self) -> int:
        """Width of the token embeddings accepted in place of ids; 0 if none are."""
        return (self.model.embeds_width or 0) if self.for_embeds is not None else 0

    @property
    def takes_adapters(self) -> bool:
        """Whether it computes rows that have an adapter."""
        return self.adapters is not None

    @property
    def cosine_with_float32(self) -> float | None:
        """Agreement of a quantised model with float32: the mean over some texts."""
        return self.model.mean_cosine

    @property
    def concurrent_launches(self) -> int:
        """Number of threads that may call ``launch`` at a time."""
        return self.programs.params.streams

    @property
    def background_launches(self) -> int:
        """Number of further threads that may launch planned batches, which are computed at idle priority."""
        return self.programs.params.idle_streams

    @property
    def probe_request(self) -> PoolingRequest | None:
        """A short row for one of the heads."""
        no_padding = int(self.model.pad_token_id == 0)  # the padding token may be the vocabulary's last
        prompt = RenderedPrompt(np.full(8, no_padding, dtype=np.int32))
        return PoolingRequest(prompt, (self.compared[0],)) if self.compared else None

    def value_of(self, prompt: RenderedPrompt) -> PooledValue:
        """Return the value of a row for the first of the params that are compared."""
        ((value,),) = self._compute([PoolingRequest(prompt, (self.compared[0],))])
        return value

    def accept_embeds(self) -> None:
        """Load the model by torch for rows of token embeddings, if it takes any. Blocks. Raises ``ModelLoadError``."""
        if self.model.embeds_width is None:
            raise ModelLoadError("--enable-prompt-embeds: torch computes token embeddings, and cannot load this model.")
        if not self.model.embeds_width or self.load_by_torch is None:
            return
        before = resident_bytes()
        runner = self.load_by_torch()
        runner.prepare(None)
        self.for_embeds = runner
        took = (resident_bytes() - before) / 2**20
        logger.info("--enable-prompt-embeds: torch computes token embeddings, which takes %.0f MiB", took)

    def prepare(self, wanted_batch_tokens: int | None) -> int:
        """Return the token budget of batches: the wanted one, or the model's default."""
        return wanted_batch_tokens or self.model.default_batch_tokens

    def return_memory(self) -> None:
        """Return the memory of OpenVINO's largest pass, and pages of the weights."""
        self.programs.return_memory()
        if self.adapters is not None:
            self.adapters.return_memory()
        if self.modules is not None:
            self.modules.compiled.return_memory()
