"""Computes a server's graph by OpenVINO and nothing else: no tokenizer, no server, no Python but the call."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

Arrays = Mapping[str, npt.NDArray[Any]]

Vectors = npt.NDArray[np.float32]
"""[rows, dimensions], of any length."""


@frozen
class Graph:
    """A model as OpenVINO computes it; ``precision`` is that of everything that the file has in float32."""

    path: str
    precision: str = ""

    @property
    def name(self) -> str:
        """Words for tables."""
        return f"openvino, {self.precision}"


def inputs_of(ids: Sequence[Sequence[int]], names: Sequence[str]) -> Arrays:
    """Return a graph's inputs for rows of token ids."""
    from trio_pool_serve.runner.batch_rows import Rows
    from trio_pool_serve.types import PoolingRequest, RenderedPrompt

    requests = [PoolingRequest(RenderedPrompt(np.array(row, np.int32))) for row in ids]
    return Rows(requests, pad_token_id=0).arrays(names)


def graph_of(runner: Any) -> Graph | None:
    """Return the graph that a server's runner computes; ``None`` if torch computes the model."""
    if not hasattr(runner, "programs"):
        return None
    return Graph(str(runner.programs.graph), runner.programs.params.precision)


def compile_graph(graph: Graph, threads: int, streams: int = 1) -> Any:
    """Return OpenVINO's compiled model, with its own default for every other setting. Blocks for a second."""
    from trio_pool_serve.runner.openvino import programs

    settings = {"INFERENCE_PRECISION_HINT": graph.precision, "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": streams}
    return programs.ov.Core().compile_model(programs.read_graph(Path(graph.path)), "CPU", settings)


def open_graph(graph: Graph, threads: int) -> tuple[list[str], Callable[[Arrays], Vectors]]:
    """Return the names of the inputs, and what computes them. Blocks for seconds."""
    compiled = compile_graph(graph, threads)
    request = compiled.create_infer_request()

    def compute(arrays: Arrays) -> Vectors:
        request.infer(arrays, share_inputs=True, share_outputs=True)
        return request.get_tensor("vectors").data

    return [of_model.any_name for of_model in compiled.inputs], compute
