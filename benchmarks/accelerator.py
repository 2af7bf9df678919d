"""How well does a server use a GPU? Tokens and requests per second, what HTTP adds, and how busy the GPU is.

BERT-base with random weights, as published results for embedding models of that size have it:

- 50 tokens per text, 1024 clients, one text per request, and 64: tokens per second, and the GPU's busy share;
- 32 tokens, 64 clients, one text per request: requests per second;
- one client: milliseconds of a request over those of the same text through the runner in a separate process.

    python -m benchmarks.accelerator --flags="--api-workers 4 --engine process"
    python -m benchmarks.accelerator --shape tiny --device cpu --rounds 1 --seconds 1   # to see whether it works

nvidia-smi counts a GPU as busy while any kernel runs, however small.
"""

import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import attrs
import cyclopts
import httpx
import numpy as np
import numpy.typing as npt
import trio
from attrs import define, field, frozen
from cyclopts import Parameter

from benchmarks.bert_shapes import Shape, write_bert
from benchmarks.load import LoadJob, LoadResult, run_load
from benchmarks.machine import describe_machine
from benchmarks.model import Texts, check_vectors
from benchmarks.report import (
    RESULTS,
    console,
    open_figure,
    open_progress,
    print_table,
    warn_if_busy,
    write_figure,
    write_json,
)
from benchmarks.servers import Server, open_server

CHECKED_TEXTS = 8

WATCHED_EVERY_MS = 200


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """What is run: ``seconds`` per row and round. ``flags`` are those of the server."""

    rounds: int = 5
    seconds: float = 8.0
    shape: Shape = "base"
    device: str = "cuda:0"
    flags: str = ""
    output_dir: Path = RESULTS


@frozen
class Row:
    """One line of the table."""

    name: str
    tokens: int
    clients: int
    batch: int


ROWS = (
    Row("1024 clients, 1 text", tokens=50, clients=1024, batch=1),
    Row("1024 clients, 64 texts", tokens=50, clients=1024, batch=64),
    Row("64 clients, 1 text", tokens=32, clients=64, batch=1),
    Row("1 client, 1 text", tokens=32, clients=1, batch=1),
)

FEWER_CLIENTS = {1024: 16, 64: 8}
"""Clients for a tiny model on CPU, which only shows that the script works."""


def rows_for(settings: Settings) -> list[Row]:
    """Return the rows, with fewer clients for the tiny shape."""
    if settings.shape == "base":
        return list(ROWS)
    return [attrs.evolve(row, clients=FEWER_CLIENTS.get(row.clients, row.clients)) for row in ROWS]


# -- the GPU, watched -----------------------------------------------------------------------------------


@define
class Watched:
    """Shares of time that the GPU was busy, in percent, sampled; empty where there is none."""

    samples: list[float] = field(factory=list)

    @property
    def busy(self) -> float | None:
        """The mean of what was sampled after the first second."""
        settled = self.samples[1000 // WATCHED_EVERY_MS :] or self.samples
        return mean(settled) if settled else None


@asynccontextmanager
async def watch_gpu(device: str) -> AsyncIterator[Watched]:
    """Sample the GPU's busy share for as long as the block."""
    watched = Watched()
    if device == "cpu":
        yield watched
        return
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    command += ["-i", device.partition(":")[2] or "0", "-lms", str(WATCHED_EVERY_MS)]
    async with trio.open_nursery() as nursery:
        start = partial(trio.run_process, command, stdout=subprocess.PIPE, check=False)
        process = await nursery.start(start)
        nursery.start_soon(_read_samples, process, watched)
        yield watched
        nursery.cancel_scope.cancel(reason="enough was seen")


async def _read_samples(process: trio.Process, watched: Watched) -> None:
    assert process.stdout is not None
    rest = b""
    async for part in process.stdout:
        *lines, rest = (rest + part).split(b"\n")
        watched.samples += [float(line) for line in lines if line.strip().isdigit()]


# -- the same model without a server ----------------------------------------------------------------------

OFFLINE = """
import json, sys, time
from pathlib import Path
import trio
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.prompts import RenderingParams, TextPrompt
from trio_pool_serve.models.loading.renderer_loading import renderer_of
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.models.loading.runner_loading import load_runner
from trio_pool_serve.types import Batch, PoolingRequest

async def main():
    path, device, seconds, texts = json.loads(sys.stdin.read())
    config = ModelConfig(device=device)
    folder = read_model_folder(Path(path), config)
    offload = Offload(in_threads=False)
    runner = load_runner(folder, config, offload)
    renderer = renderer_of(folder, load_tokenizer(folder), offload, workers=1)
    took = []
    begin = time.perf_counter()
    while time.perf_counter() < begin + seconds + 0.5:
        started = time.perf_counter()
        prompt = await renderer.render(TextPrompt(texts[len(took) % len(texts)]), RenderingParams())
        await runner.launch(Batch((PoolingRequest(prompt),)))
        took.append(time.perf_counter() - started)
    settled = sorted(took[len(took) // 5:])
    print(json.dumps(1e3 * settled[len(settled) // 2]))

trio.run(main)
"""


async def offline_ms(folder: Path, texts: list[str], settings: Settings) -> float:
    """Return the median milliseconds of a text through renderer and runner, in a process without a server."""
    job = json.dumps([str(folder), settings.device, settings.seconds, texts]).encode()
    done = await trio.run_process([sys.executable, "-c", OFFLINE], stdin=job, capture_stdout=True, capture_stderr=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


# -- measuring ------------------------------------------------------------------------------------------


@define
class Measurements:
    """All rounds, by the rows' names; what was computed offline; and the GPU's busy share, percent."""

    loads: dict[str, list[LoadResult]] = field(factory=dict)
    busy: dict[str, list[float]] = field(factory=dict)
    offline: list[float] = field(factory=list)

    def median(self, row: Row, quantity: str) -> float:
        """Return the median of a quantity over the rounds."""
        return median(getattr(result, quantity) for result in self.loads[row.name])

    def tokens_per_s(self, row: Row) -> float:
        """Return what a row's requests per second are in tokens."""
        return self.median(row, "requests_per_s") * row.batch * row.tokens

    def added_ms(self) -> float | None:
        """Return what a server adds for one client: the median of each round's difference."""
        alone = self.loads.get(ROWS[-1].name, [])
        return median(on.p50_ms - off for on, off in zip(alone, self.offline, strict=True)) if alone else None


def bodies_for(row: Row, folder: Path) -> list[str]:
    """Return bodies with different texts, as many as are not worth caching."""
    count = max(1, 512 // row.batch)
    texts = Texts().make(count * row.batch, row.tokens)
    groups = [texts[index * row.batch : (index + 1) * row.batch] for index in range(count)]
    return [
        json.dumps({"model": str(folder), "input": group if row.batch > 1 else group[0], "encoding_format": "base64"})
        for group in groups
    ]


async def measure(server: Server, folder: Path, settings: Settings) -> Measurements:
    """Run all rows in turns, round after round."""
    measured = Measurements()
    rows = rows_for(settings)
    bodies = {row.name: bodies_for(row, folder) for row in rows}
    texts = Texts().make(256, ROWS[-1].tokens)

    async def load(row: Row, seconds: float) -> LoadResult:
        job = LoadJob(port=server.port, bodies=bodies[row.name], clients=row.clients, seconds=seconds)
        return await run_load(job)

    with open_progress() as progress:
        for row in progress.track(rows, description="warming up"):
            await load(row, min(3.0, settings.seconds))
        for _ in progress.track(range(settings.rounds), description="measuring"):
            for row in rows:
                async with watch_gpu(settings.device) as watched:
                    measured.loads.setdefault(row.name, []).append(await load(row, settings.seconds))
                if watched.busy is not None:
                    measured.busy.setdefault(row.name, []).append(watched.busy)
            measured.offline.append(await offline_ms(folder, texts, settings))
    return measured


async def check(server: Server, folder: Path) -> float:
    """Return the least cosine of the server's vectors with float32. Raises ``WrongAnswerError``."""
    texts = Texts().make(CHECKED_TEXTS, 50)
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=120) as client:
        body = {"model": str(folder), "input": texts, "encoding_format": "float"}
        answer = (await client.post("/v1/embeddings", json=body)).raise_for_status().json()
    return check_vectors(
        np.array([one["embedding"] for one in answer["data"]], dtype=np.float32), oracle(folder, texts)
    )


def oracle(folder: Path, texts: list[str]) -> npt.NDArray[np.float32]:
    """Return the vectors as transformers computes them in float32 on CPU: the first token's state."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    with torch.inference_mode():
        states = model(**tokenizer(texts, padding=True, return_tensors="pt")).last_hidden_state
    vectors: npt.NDArray[np.float32] = torch.nn.functional.normalize(states[:, 0], dim=-1).numpy()
    return vectors


# -- reporting ------------------------------------------------------------------------------------------


def show(measured: Measurements, settings: Settings) -> None:
    """Print the table."""
    lines = []
    for row in rows_for(settings):
        busy = measured.busy.get(row.name)
        lines.append(
            [
                f"{row.name}, {row.tokens} tokens",
                f"{measured.median(row, 'requests_per_s'):.0f}",
                f"{measured.tokens_per_s(row):.0f}",
                f"{measured.median(row, 'p50_ms'):.2f}",
                f"{measured.median(row, 'p99_ms'):.2f}",
                f"{median(busy):.0f} %" if busy else "–",
            ]
        )
    print_table("BERT-base" if settings.shape == "base" else "a tiny model", COLUMNS, lines)
    console.print(f"one client: online − offline = {measured.added_ms():.2f} ms", highlight=False)


COLUMNS = ["load", "requests/s", "tokens/s", "p50 ms", "p99 ms", "GPU busy"]


def draw(measured: Measurements, settings: Settings) -> None:
    """Plot tokens per second, and latencies."""
    rows = rows_for(settings)
    figure, (tokens, latencies) = open_figure(2)
    names = [f"{row.name},\n{row.tokens} tokens" for row in rows]
    tokens.bar(names, [measured.tokens_per_s(row) for row in rows])
    tokens.set(title="Tokens per second", ylim=(0, None))
    for quantity in ("p50_ms", "p99_ms"):
        latencies.plot(names, [measured.median(row, quantity) for row in rows], "o", label=quantity.removesuffix("_ms"))
    latencies.set(title="Latency, ms", yscale="log")
    latencies.legend(frameon=False)
    for axis in (tokens, latencies):
        axis.tick_params(axis="x", labelsize=7)
    write_figure(figure, settings.output_dir, "accelerator")


def describe_gpu(device: str) -> str | None:
    """Return the GPU's name and driver, from nvidia-smi."""
    if device == "cpu":
        return None
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    completed = subprocess.run(
        [*command, "-i", device.partition(":")[2] or "0"], capture_output=True, text=True, check=True
    )
    return completed.stdout.strip()


async def run(settings: Settings) -> None:
    """Start the server, check it, measure, report."""
    machine = {**describe_machine(), "gpu": describe_gpu(settings.device)}
    warn_if_busy(machine)
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_bert(Path(temporary) / "bert", settings.shape)
        module = ["trio_pool_serve", "serve", str(folder), "--device", settings.device, *shlex.split(settings.flags)]
        began = time.perf_counter()
        async with open_server("ours", module, ready_path="/readyz") as server:
            start_s = time.perf_counter() - began
            cosine = await check(server, folder)
            measured = await measure(server, folder, settings)
    show(measured, settings)
    document: dict[str, Any] = {
        "machine": machine,
        "settings": attrs.asdict(settings, filter=lambda attribute, _: attribute.name != "output_dir"),
        "least_cosine_with_float32": cosine,
        "start_s": start_s,
        "online_minus_offline_ms": measured.added_ms(),
        "offline_ms": measured.offline,
        "rows": [
            {
                **attrs.asdict(row),
                "tokens_per_s": measured.tokens_per_s(row),
                "gpu_busy_percent": measured.busy.get(row.name),
                "rounds": [attrs.asdict(result) for result in measured.loads[row.name]],
            }
            for row in rows_for(settings)
        ],
    }
    write_json(settings.output_dir, "accelerator", document)
    draw(measured, settings)


def main(settings: Settings = Settings()) -> None:
    """Measure a server on a GPU."""
    if settings.device != "cpu" and not _has_gpu():
        console.print("There is no GPU here; --device cpu --shape tiny shows whether the script works.")
        return
    trio.run(run, settings)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    cyclopts.run(main)
