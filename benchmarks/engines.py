"""Computes a model's file by an engine and nothing else: no tokenizer, no server, no Python but the call."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from benchmarks.llama_cpp import open_gguf

Arrays = Mapping[str, npt.NDArray[Any]]

Vectors = npt.NDArray[np.float32]
"""[rows, dimensions], of any length."""


@frozen
class EngineFile:
    """A model as an engine computes it. OpenVINO computes in ``precision`` all that the file has in float32.

    ``libraries`` is the folder of llama.cpp's.
    """

    engine: str
    path: str
    precision: str = ""
    libraries: str = ""

    @property
    def name(self) -> str:
        """Words for tables."""
        return f"{self.engine}, {self.precision}"


def inputs_of(ids: Sequence[Sequence[int]], names: Sequence[str]) -> Arrays:
    """Return a graph's inputs for rows of token ids."""
    from trio_pool_serve.runner.batch_rows import Rows
    from trio_pool_serve.types import PoolingRequest, RenderedPrompt

    requests = [PoolingRequest(RenderedPrompt(np.array(row, np.int32))) for row in ids]
    return Rows(requests, pad_token_id=0).arrays(names)


def file_of(runner: Any) -> EngineFile | None:
    """Return the graph that a server's runner computes; ``None`` if torch computes the model."""
    if not hasattr(runner, "programs"):
        return None
    return EngineFile("openvino", str(runner.programs.graph), runner.programs.params.precision)


def compile_graph(file: EngineFile, threads: int, streams: int = 1) -> Any:
    """Return OpenVINO's compiled model, with its own default for every other setting. Blocks for a second."""
    from trio_pool_serve.runner.openvino import programs

    settings = {"INFERENCE_PRECISION_HINT": file.precision, "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": streams}
    return programs.ov.Core().compile_model(programs.read_graph(Path(file.path)), "CPU", settings)


def open_engine(file: EngineFile, threads: int) -> tuple[list[str], Callable[[Arrays], Vectors]]:
    """Return the names of the inputs, and what computes them. Blocks for seconds."""
    if file.engine == "llama.cpp":
        return ["input_ids"], open_gguf(file.path, threads, Path(file.libraries))
    if file.engine == "onnxruntime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(file.path, options, providers=["CPUExecutionProvider"])
        return [node.name for node in session.get_inputs()], lambda arrays: session.run(["vectors"], arrays)[0]
    compiled = compile_graph(file, threads)
    request = compiled.create_infer_request()

    def compute(arrays: Arrays) -> Vectors:
        request.infer(arrays, share_inputs=True, share_outputs=True)
        return request.get_tensor("vectors").data

    return [of_model.any_name for of_model in compiled.inputs], compute
