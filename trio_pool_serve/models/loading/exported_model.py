"""Converting a model from an exported file without torch, if its heads are the usual ones."""

import logging
from pathlib import Path

import numpy as np
import openvino as ov
from attrs import define, field
from msgspec.structs import replace

from trio_pool_serve.config.computing_config import CPU_BATCH_TOKENS
from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.models.files.exported_files import exported_file
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.runner.openvino.converted_model import GRAPH, Check, ConvertedModel, UnusableGraphError, is_near
from trio_pool_serve.runner.openvino.exported_graph import ExportedGraph
from trio_pool_serve.runner.openvino.openvino_runner import OpenVinoRunner
from trio_pool_serve.runner.openvino.programs import PRECISIONS, CompileParams, write_graph
from trio_pool_serve.runner.shared_cores import usable_cores
from trio_pool_serve.types import Batch, CopiedBatch, PoolingRequest, RenderedPrompt

logger = logging.getLogger(__name__)

ROW_TOKENS = 5

PADDING_TOLERANCE = {"float32": 1e-5, "bfloat16": 0.03, "int8": 0.03}
"""Maximum change of a number of a row by padding, relative to the row's largest: both computations round."""


def file_to_convert(folder: AnyModelFolder, dtype: str, reason: str) -> Path:
    """Return the exported file of a model. Raises ``ModelLoadError`` if there is none; ``reason``: why not torch."""
    if (file := exported_file(folder.transformer_path, in_int8=dtype == "int8")) is None:
        raise ModelLoadError(f"The model has not been converted to {dtype} yet, and {reason}. {ways_out(folder)}")
    return file


@define(eq=False)
class ExportedModel:
    """Converts an exported file, which it reads: a ``Converter``. ``reason``: why torch does not load the model.

    Raises ``ModelLoadError`` if the file or the model's heads cannot be used.
    """

    folder: AnyModelFolder
    file: Path
    dtype: str
    reason: str
    _graph: ov.Model | None = field(init=False)
    _model: ConvertedModel = field(init=False)

    def __attrs_post_init__(self) -> None:
        exported_heads, spec = self.folder.kind.exported_heads, self.folder.spec
        if exported_heads is None:
            raise self._unusable(f"{type(spec).__name__} models require torch")
        try:
            heads = exported_heads(spec)
            exported = ExportedGraph.read(self.file, heads.output)
            parameters, weight_bytes = exported.parameters()
            self._graph = exported.joined(heads.graph)
        except (UnusableGraphError, RuntimeError) as error:
            raise self._unusable(str(error)) from error
        self._model = ConvertedModel(
            what=f"{self.folder.model_type} in {self.dtype}",
            origin=f"from {self.file.parent.name}/{self.file.name}, not compared with torch",
            heads=dict(heads.heads),
            about_heads=heads.about,
            parameters=parameters,
            weight_bytes=weight_bytes,
            pad_token_id=self.folder.pad_token_id,
            default_batch_tokens=CPU_BATCH_TOKENS,
        )

    def convert(self, folder: Path) -> ConvertedModel:
        """Write the graph with its heads, as ``Converter.convert``. Also raises ``ModelLoadError``."""
        logger.warning("%s: the model is %s, as %s", self.folder.path.name, self._model.origin, self.reason)
        write_graph(self._graph, folder / GRAPH)
        runner = OpenVinoRunner.of_folder(folder, self._model, CompileParams(PRECISIONS[self.dtype], usable_cores()))
        ids = np.random.default_rng(0).integers(self.folder.vocab_size, size=3 * ROW_TOKENS).astype(np.int32)
        short, long = RenderedPrompt(ids[:ROW_TOKENS]), RenderedPrompt(ids)
        try:
            alone, params = runner.value_of(short), (self._model.compared[0],)
            computed = runner.launch(Batch(tuple(PoolingRequest(row, params) for row in (short, long))))
        except RuntimeError as error:
            raise self._unusable(str(error)) from error
        assert isinstance(computed, CopiedBatch)  # noqa: S101  (on CPU)
        require(is_near(alone, alone, 0), "its output contains infinities or NaN", self._unusable)
        masks_padding = is_near(computed.rows[0][0], alone, PADDING_TOLERANCE[self.dtype])
        dimensions = len(np.asarray(alone)) if "Embed" in runner.model.heads else 0
        return replace(self._model, check=Check.of(short, alone), dimensions=dimensions, masks_padding=masks_padding)

    def close(self) -> None:
        """Free the memory of the graph."""
        self._graph = None

    def _unusable(self, why: str) -> ModelLoadError:
        name = f"{self.file.parent.name}/{self.file.name}"
        return ModelLoadError(f"{name} cannot be used: {why}; and {self.reason}. {ways_out(self.folder)}")


def ways_out(folder: AnyModelFolder) -> str:
    """Return advice for a model that only torch can convert."""
    return (
        "Run `pip install torch transformers`. Or, on a machine with these packages and the model's weights for torch, "
        f"run `trio-pool-serve convert {folder.path}`, and use its --cache-dir here."
    )
