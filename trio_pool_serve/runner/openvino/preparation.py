"""The conversion of a model that torch has loaded: made, compared with torch, timed, and written to a folder."""

import copy
import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openvino as ov
import torch
from attrs import define, evolve, field
from msgspec.structs import replace

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import require
from trio_pool_serve.runner.cpu_features import saturates_int8
from trio_pool_serve.runner.device_memory import is_out_of_memory
from trio_pool_serve.runner.loaded_model import Backbone, LoadedModel
from trio_pool_serve.runner.openvino.converted_model import (
    COMPARED,
    GRAPH,
    LONGEST_COMPARED,
    MAX_RATIO,
    MODULES,
    TABLE,
    Check,
    ConvertedModel,
    UnusableGraphError,
    as_vectors,
)
from trio_pool_serve.runner.openvino.exported_graph import ExportedGraph
from trio_pool_serve.runner.openvino.graph import Traced, convert, convert_heads, convert_modules, modules_in, quantize
from trio_pool_serve.runner.openvino.heads import TokenLabels
from trio_pool_serve.runner.openvino.openvino_runner import OpenVinoRunner
from trio_pool_serve.runner.openvino.programs import PRECISIONS, CompileParams, write_graph
from trio_pool_serve.runner.openvino.trial import try_speed
from trio_pool_serve.runner.transformer_runner import TransformerRunner
from trio_pool_serve.telemetry.start_display import report_step
from trio_pool_serve.types import (
    Batch,
    Classify,
    CopiedBatch,
    PooledValue,
    PoolingParams,
    PoolingRequest,
    RenderedPrompt,
    Runner,
)

logger = logging.getLogger(__name__)

MIN_COSINE = {"float32": 0.99999, "bfloat16": 0.999, "int8": 0.999}
"""Smallest cosine of a row's output with the model's output in float32; for int8, before it is quantised."""

LEAST_COSINE = 0.99
"""In bfloat16 a smaller cosine, down to this, suffices if torch's in bfloat16 is no better. Differences add up over
layers: a Qwen3 with 12 layers of large random weights has 0.9995 by either."""

WORSE = 2
"""Factor by which 1 − cosine, which grows with the square of the differences, may exceed torch's."""

GOOD_INT8_COSINE = 0.99
"""Below it, on a CPU whose sums overflow, weights are tried in half of the range. Of a BERT of random weights the mean
rose from 0.988 to 0.999; of MiniLM, which has 0.993, it would have fallen to 0.992 (AVX2, no VNNI)."""

MIN_INT8_COSINE = 0.98
"""Smallest mean cosine of a quantised model's outputs with the outputs in float32."""

HELD_OUT_ROWS = 8
"""Rows of a batch on which a quantised model is compared."""


@define(eq=False)
class Preparation:
    """The conversion of one model. ``by_torch`` computes it as it was loaded."""

    by_torch: TransformerRunner
    config: ModelConfig
    extreme_prompts: Callable[[int], Sequence[RenderedPrompt]]
    """Returns a short text and one of the given number of tokens, each as query and document of the model. Blocks."""
    sample_prompts: Callable[[], tuple[Sequence[RenderedPrompt], Sequence[RenderedPrompt]]] = lambda: ((), ())
    """Returns prompts to quantise the model with, and others to compare its output on. Blocks: loads the tokenizer."""
    may_time: bool = True
    """Whether no other models compute on these cores: then two computations can be compared by their times."""
    exported: Path | None = None
    """A file with the backbone as another tool has exported it, if the folder has one."""
    _exact: TransformerRunner = field(init=False)
    """Computes the model in float32."""
    _traced: Traced = field(init=False)
    _model: ConvertedModel = field(init=False)

    def convert(self, folder: Path) -> ConvertedModel:
        """Write the conversion to an empty folder and return its record.

        Blocks for seconds, for minutes if the model is quantised. Raises ``UnusableGraphError``, and ``OSError`` if
        the folder cannot be written, or if memory does not suffice: neither is due to the model.
        """
        try:
            return self._convert(folder)
        except OSError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)}: {_reason(error)}") from error
            raise UnusableGraphError(_reason(error)) from error

    def close(self) -> None:
        """Do nothing: it holds memory only."""

    def _convert(self, folder: Path) -> ConvertedModel:
        report_step("converting for OpenVINO")
        loaded = in_float32(self.by_torch.loaded)
        self._exact = evolve(self.by_torch, loaded=loaded, compute=loaded.backbone)
        self._traced = Traced(loaded)
        self._model = self._describe()
        if self._traced.table is not None:
            np.save(folder / TABLE, self._traced.table.numpy())
        if (modules := self._traced.after_pooling) is not None:
            width = loaded.backbone.model.config.get_text_config().hidden_size * self._traced.poolings
            write_graph(convert_modules(modules, width), folder / MODULES)
        if self._dtype == "int8":
            self._quantize(self._converted(), folder)
        elif not self._take_exported(folder):
            self._compare(self._converted(), folder)
        runner = self._runner(folder)
        if self.config.backend == "auto" and self._dtype != "int8" and self.may_time:
            self._time(runner)
        prompt = RenderedPrompt(
            all_batches(loaded.backbone, self.by_torch.params.max_tokens, self._marker)[0][0].token_ids
        )
        return replace(self._model, check=Check.of(prompt, runner.value_of(prompt)))

    def _converted(self) -> ov.Model:
        graph = convert(self._traced)
        self._model = replace(self._model, modules=modules_in(graph, self._traced.backbone))
        return graph

    @property
    def _dtype(self) -> str:
        return "int8" if self.config.dtype == "int8" else str(self.by_torch.params.dtype).removeprefix("torch.")

    def _describe(self) -> ConvertedModel:
        by_torch, loaded, facts = self.by_torch, self.by_torch.loaded, self.by_torch.facts
        return ConvertedModel(
            what=f"{loaded.backbone.model.config.model_type} in {self._dtype}",
            why_float32=facts.why_float32,
            is_rounded=not facts.why_float32,
            heads=self._traced.heads,
            about_heads=loaded.description,
            parameters=facts.parameters,
            weight_bytes=facts.weight_bytes,
            dimensions=facts.dimensions,
            embeds_width=facts.embeds_width,
            pad_token_id=by_torch.params.pad_token_id,
            masks_padding=by_torch.masks_padding,
            default_batch_tokens=facts.max_batch_tokens,
        )

    @property
    def _marker(self) -> int | None:
        """The token at which a head has values, if it has none at others."""
        return next((head.step_token_id for head in self._traced.heads.values() if isinstance(head, TokenLabels)), None)

    def _runner(self, folder: Path) -> OpenVinoRunner:
        """Return a runner of the graph that was written.

        A graph that was just converted would give other numbers than each later start, Gemma 3 in bfloat16 by 0.03: its
        nodes have marks that are not saved, and because of which some of them are neither folded nor fused.
        """
        params = CompileParams(PRECISIONS[self._model.dtype_of(self._dtype)], cores=torch.get_num_threads())
        return OpenVinoRunner.of_folder(folder, self._model, params)

    def _take_exported(self, folder: Path) -> bool:
        """Return whether the exported file is the backbone of the conversion, which it is if it is usable."""
        if self.exported is None:
            return False
        name = f"{self.exported.parent.name}/{self.exported.name}"
        try:
            graph = ExportedGraph.read(self.exported, self.by_torch.loaded.backbone.output)
            self._compare(graph.joined(convert_heads(self._traced)), folder)
        except OSError:
            raise
        except Exception as error:
            self._model = replace(self._describe(), origin=f"not from {name}: {_reason(error)}")
        else:
            self._model = replace(self._model, origin=f"from {name}")
        logger.info("the model was converted %s", self._model.origin)
        return self._model.origin == f"from {name}"

    def _compare(self, graph: ov.Model, folder: Path) -> None:
        """Write the graph. Raises ``UnusableGraphError`` if its output is not near the model's in float32."""
        report_step("comparing OpenVINO with torch")
        write_graph(graph, folder / GRAPH)
        batches = all_batches(self.by_torch.loaded.backbone, self.by_torch.params.max_tokens, self._marker)
        batches.append([*self.extreme_prompts(len(batches[-1][0].token_ids))])
        cosine = self._cosine(folder, batches)
        if self._dtype == "bfloat16" and MIN_COSINE["bfloat16"] > cosine >= LEAST_COSINE:
            of_torch = agreement(self.by_torch, self._exact, batches).min()
            if 1 - cosine <= WORSE * (1 - of_torch):
                return
        if cosine >= MIN_COSINE[self._dtype]:
            return
        reason = f"OpenVINO's output differs: cosine {cosine:.5f}"
        if self._dtype == "bfloat16" and self.config.dtype != "bfloat16":
            self._model = replace(self._model, why_float32=f"in bfloat16 {reason}")
            if self._cosine(folder, batches) >= MIN_COSINE["float32"]:
                return
            self._model = replace(self._model, why_float32="")
        raise UnusableGraphError(reason)

    def _cosine(self, folder: Path, batches: Sequence[Sequence[RenderedPrompt]]) -> float:
        """Return the lowest cosine of the written graph's outputs with float32."""
        return float(agreement(self._runner(folder), self._exact, batches).min())

    def _quantize(self, graph: ov.Model, folder: Path) -> None:
        """Write the graph in int8. Raises ``UnusableGraphError`` if its output is not near the model's in float32."""
        self._compare(graph, folder)
        calibration, texts = self.sample_prompts()
        held_out = [texts[at : at + HELD_OUT_ROWS] for at in range(0, len(texts), HELD_OUT_ROWS)]

        def attempt(*, halves_range: bool) -> tuple[npt.NDArray[np.float64], ov.Model]:
            quantized = quantize(
                graph, calibration, pad_token_id=self.by_torch.params.pad_token_id, halves_range=halves_range
            )
            write_graph(quantized, folder / GRAPH)
            return agreement(self._runner(folder), self._exact, held_out), quantized

        found, quantized = attempt(halves_range=False)
        if found.mean() < GOOD_INT8_COSINE and saturates_int8():
            other, _ = attempt(halves_range=True)
            if other.mean() > found.mean():
                found = other
            else:
                write_graph(quantized, folder / GRAPH)
        require(
            bool(found.mean() >= MIN_INT8_COSINE),
            f"in int8 the model's output differs too much from float32: cosine {found.mean():.4f} on average, "
            f"the minimum is {MIN_INT8_COSINE}",
            UnusableGraphError,
        )
        self._model = replace(self._model, mean_cosine=float(found.mean()), lowest_cosine=float(found.min()))

    def _time(self, runner: OpenVinoRunner) -> None:
        """Note the result of a trial of speed; an unreliable one does not count against bfloat16."""
        report_step("measuring OpenVINO and torch")
        trial = try_speed(
            runner.launch,
            self.by_torch.launch,
            params=runner.model.compared[0],
            vocab_size=self.by_torch.loaded.backbone.vocab_size,
            max_tokens=self.by_torch.params.max_tokens,
        )
        if trial.ratio <= MAX_RATIO or trial.is_steady or self._model.why_float32:
            self._model = replace(self._model, time_ratio=trial.ratio)


def in_float32(loaded: LoadedModel) -> LoadedModel:
    """Return a model whose backbone is in float32: itself, or with a copy; heads are in float32 always."""
    backbone = loaded.backbone
    if next(backbone.model.parameters()).dtype == torch.float32:
        return loaded
    return evolve(loaded, backbone=Backbone(copy.deepcopy(backbone.model).float(), backbone.output))


def _reason(error: Exception) -> str:
    """Return why a model, or a file of it, is not computed by OpenVINO."""
    is_ours = isinstance(error, UnusableGraphError)
    return str(error) if is_ours else f"OpenVINO fails: {repr(error).splitlines()[0][:200]}"


SHORT = (33, 12, 5, 1)
"""Lengths of the rows of the short batch; none is the length of the converter's example."""

LONG_COST = 1e11
"""Tokens times parameters of the longest row to compare on: about two seconds of torch on two cores."""

BEYOND_WINDOW = 40
"""Tokens of a row beyond the window of the model's sliding attention."""


def all_batches(backbone: Backbone, max_tokens: int, marker: int | None = None) -> list[list[RenderedPrompt]]:
    """Return a batch of short rows, and one with a row that is as long as the model allows, or as time allows.

    Beside it is a short row, whose padding lies beyond the window of sliding attention. The tokens are random, and the
    same on each call; every third is ``marker``, if there is one.
    """
    of_text = backbone.model.config.get_text_config()
    window = getattr(of_text, "sliding_window", None) or getattr(of_text, "local_attention", None) or 0
    affordable = max(64, int(LONG_COST / backbone.parameters), window + BEYOND_WINDOW)
    long = min(max_tokens, LONGEST_COMPARED, affordable)
    short = [min(length, max_tokens) for length in SHORT]
    return [_random_rows(backbone, lengths, marker) for lengths in (short, [long, min(3, max_tokens)])]


def _random_rows(backbone: Backbone, lengths: Sequence[int], marker: int | None) -> list[RenderedPrompt]:
    random = np.random.default_rng(0)
    segments = getattr(backbone.model.config, "type_vocab_size", 0) if backbone.takes_type_ids else 0

    def row(length: int) -> RenderedPrompt:
        ids = random.integers(backbone.vocab_size, size=length).astype(np.int32)
        if marker is not None:
            ids[::3] = marker
        types = np.sort(random.integers(segments, size=length)).astype(np.int32) if segments > 1 else None
        return RenderedPrompt(ids, type_ids=types)

    return [row(length) for length in lengths]


def agreement(
    ours: Runner, expected: TransformerRunner, batches: Iterable[Sequence[RenderedPrompt]]
) -> npt.NDArray[np.float64]:
    """Return the cosines of two runners' values for all params that are compared: one or more for each row."""
    compared = [params for params in COMPARED if type(params) in expected.loaded.heads]
    return np.array(
        [
            cosine
            for batch in batches
            for params in compared
            for cosine in _cosines(_values(ours, batch, params), _values(expected, batch, params), params)
        ]
    )


def _values(runner: Runner, prompts: Sequence[RenderedPrompt], params: PoolingParams) -> list[PooledValue]:
    computed = runner.launch(Batch(tuple(PoolingRequest(prompt, (params,)) for prompt in prompts)))
    assert isinstance(computed, CopiedBatch)  # noqa: S101  (on CPU)
    return [values[0] for values in computed.rows]


def _cosines(ours: Sequence[PooledValue], expected: Sequence[PooledValue], params: PoolingParams) -> Iterator[float]:
    pairs = list(map(as_vectors, ours, expected))
    if isinstance(params, Classify):  # a single row may have a single number
        pairs = [(np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs]))]
    for a, b in pairs:
        size = float(np.linalg.norm(a) * np.linalg.norm(b))
        yield float(a @ b) / size if size else float(np.array_equal(a, b))
