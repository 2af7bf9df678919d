"""A model whose weights are in an exported file: it is converted without torch, if its heads are the usual ones."""

import logging
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import openvino as ov
from attrs import define, field
from msgspec.structs import replace

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.exported_files import exported_file, why_without_torch
from trio_pool_serve.models.loading.conversion_messages import ConversionJob
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.runner.cpu_features import dtype_on_cpu
from trio_pool_serve.runner.openvino.built_heads import BuiltHeads
from trio_pool_serve.runner.openvino.converted_model import CHECKED, GRAPH, Check, ConvertedModel, Description, versions
from trio_pool_serve.runner.openvino.exported_graph import ExportedGraph, UnusableGraphError
from trio_pool_serve.runner.openvino.heads import Floats
from trio_pool_serve.runner.openvino.openvino_runner import OpenVinoRunner
from trio_pool_serve.runner.openvino.programs import PRECISIONS, CompileParams, write_graph
from trio_pool_serve.runner.shared_cores import usable_cores
from trio_pool_serve.types import Batch, CopiedBatch, Embed, PoolingRequest, RenderedPrompt

logger = logging.getLogger(__name__)

DEFAULT_BATCH_TOKENS = 2048
"""As by torch."""

ROW_TOKENS = 5

PADDING_TOLERANCE = 0.02
"""How much padding may change a number of a row, as a part of the row's largest: bfloat16 rounds."""


@define(eq=False)
class ExportedModel:
    """Makes a conversion of an exported file: a ``Converter``. ``reason`` says why torch does not."""

    folder: AnyModelFolder
    file: Path
    reason: str
    _precision: str = field(init=False)
    _graph: ov.Model | None = field(default=None, init=False)
    _model: ConvertedModel = field(init=False)

    @classmethod
    def of(cls, folder: AnyModelFolder, dtype: str) -> "ExportedModel | None":
        """Return it for a folder whose model torch cannot load here; ``None`` if it can.

        Raises ``ModelLoadError`` if there is no exported file.
        """
        reason = why_without_torch(folder.transformer_path)
        if not reason:
            return None
        file = exported_file(folder.transformer_path, in_int8=dtype == "int8")
        if file is None:
            raise ModelLoadError(f"The model is not converted to {dtype} yet, and {reason}. {ways_out(folder)}")
        return cls(folder, file, reason)

    def load(self, job: ConversionJob) -> None:
        """Read the file. Raises ``ModelLoadError`` if it or the model's heads are unusable."""
        dtype = dtype_on_cpu(job.config.dtype)
        self._precision = PRECISIONS[dtype]
        try:
            heads = self._heads()
            exported = ExportedGraph.read(self.file, heads.output)
            parameters, looked_up, weight_bytes = exported.parameters()
            self._graph = exported.joined(heads.graph(exported.states.partial_shape))
        except (UnusableGraphError, RuntimeError) as error:
            raise self._unusable(str(error)) from error
        self._model = ConvertedModel(
            what=f"{self.folder.model_type} in {dtype}",
            versions=versions(),
            origin=f"from {self.file.parent.name}/{self.file.name}, not compared with torch",
            heads=dict(heads.heads),
            description=Description(
                parameters=parameters,
                weight_bytes=weight_bytes,
                multiplications=parameters - looked_up,
                heads=heads.about,
                dimensions=0,
                embeds_width=None,
                pad_token_id=max(0, self.folder.transformer_config.get("pad_token_id") or 0),
                default_batch_tokens=DEFAULT_BATCH_TOKENS,
            ),
        )

    def convert(self, folder: Path) -> ConvertedModel:
        """Write the graph with its heads, as ``Converter.convert``. Raises ``ModelLoadError``, too."""
        logger.warning("%s: the model is %s, as %s", self.folder.path.name, self._model.origin, self.reason)
        assert self._graph is not None  # noqa: S101  (it was loaded)
        write_graph(self._graph, folder / GRAPH)
        runner = OpenVinoRunner.of_folder(folder, self._model, CompileParams(self._precision, cores=usable_cores()))
        params = next(params for params in CHECKED.values() if type(params) in runner.heads)
        ids = np.random.default_rng(0).integers(self.folder.vocab_size, size=3 * ROW_TOKENS).astype(np.int32)
        short, long = (PoolingRequest(RenderedPrompt(row), (params,)) for row in (ids[:ROW_TOKENS], ids))
        try:
            alone, beside = (_first_of(runner, rows) for rows in ((short,), (short, long)))
        except RuntimeError as error:
            raise self._unusable(str(error)) from error
        if not np.abs(beside - alone).max() <= PADDING_TOLERANCE * np.abs(alone).max():
            raise self._unusable("its output is not finite, or depends on the padding behind a row")
        check = runner.check_of(short)
        description: Any = self._model.description
        if isinstance(params, Embed):
            description = replace(description, dimensions=len(alone))
        return replace(self._model, check=check, description=description)

    def _heads(self) -> BuiltHeads:
        kind = self.folder.kind
        if not kind.exported:
            raise UnusableGraphError(f"without torch there are no heads for {type(self.folder.spec).__name__} models")
        heads: BuiltHeads = resolve_name(kind.exported)(self.folder.spec)
        return heads

    def close(self) -> None:
        """Return the memory."""
        self._graph = None

    def _unusable(self, why: str) -> ModelLoadError:
        name = f"{self.file.parent.name}/{self.file.name}"
        return ModelLoadError(f"{name} cannot be used: {why}; and {self.reason}. {ways_out(self.folder)}")


def ways_out(folder: AnyModelFolder) -> str:
    """Return what the user can do about a model that torch has to convert."""
    return (
        "Either `pip install torch transformers`, or convert the model where they are installed, by "
        f"`trio-pool-serve convert {folder.path}` with its weights for torch, and use that --cache-dir here."
    )


def _first_of(runner: OpenVinoRunner, rows: tuple[PoolingRequest, ...]) -> Floats:
    computed = runner.launch(Batch(rows))
    assert isinstance(computed, CopiedBatch)  # noqa: S101  (on CPU)
    return Check.of(rows[0], computed.rows[0][0]).numbers()
