"""The model without a server, in a process: ``open_offline`` starts it, ``python -m benchmarks.offline`` is it.

Jobs come in on standard input and results go out on standard output, a line of JSON each. The process lives through a
whole benchmark, so that its measurements take turns with all others, and it does nothing in between.

Its arguments are those of ``trio-pool-serve serve``: a model's folder, and flags.
"""

import gc
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import trio
from attrs import Factory, define, field, frozen

from benchmarks.graphs import graph_of, inputs_of, open_graph
from benchmarks.model import LEAST_COSINE, MODEL_PATH, Texts, check_vectors, oracle_vectors

ROOT = Path(__file__).parent.parent

Way: TypeAlias = Literal["pass", "text"]
"""pass: the forward pass that the server would compute, from padded ids: the graph that it has converted, compiled by
OpenVINO in one stream; or torch's pass, if the server computes with torch.
text: all that a server does but HTTP and waiting: the server's own runner, from texts."""

BATCHES_OF_TEXTS = 16
"""Different batches that are computed in turns."""

WARM_UP_BATCHES, WARM_UP_S = 2, 0.5
"""One batch is enough if it takes longer."""


@frozen(kw_only=True)
class OfflineJob:
    """Batches of ``batch`` texts of ``tokens`` tokens, one after the other, with pauses that are not counted.

    No vector may be further from float32 than ``least_cosine``.
    """

    way: Way = "pass"
    threads: int = 1
    batch: int = 1
    tokens: int = 34
    seconds: float = 2.0
    pause_s: float = 0.0
    least_cosine: float = LEAST_COSINE


@frozen(kw_only=True)
class OfflineResult:
    """How fast they were computed, and by what: milliseconds of a batch, and CPU milliseconds of all threads."""

    by: str
    batches: int
    batch: int
    p50_ms: float
    cpu_ms: float
    least_cosine: float

    @property
    def rows_per_s(self) -> float:
        """Rows per second, by the median batch."""
        return 1e3 * self.batch / self.p50_ms


def thread_counts() -> list[int]:
    """Return with how many threads the model is computed: one, and as many as there are cores."""
    return sorted({1, len(os.sched_getaffinity(0))})


@define(eq=False)
class Offline:
    """The process, for benchmarks that measure with it."""

    _process: trio.Process

    async def measure(self, job: OfflineJob) -> OfflineResult:
        """Return the result of one job. Cancellation: at once, and nothing more can be measured."""
        assert self._process.stdin is not None
        await self._process.stdin.send_all(msgspec.json.encode(job) + b"\n")
        return msgspec.json.decode(await self._line(), type=OfflineResult)

    async def _line(self) -> bytes:
        assert self._process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            received = await self._process.stdout.receive_some()
            if not received:
                await trio.sleep_forever()  # the process has ended: ``run_process`` raises for it
            line += bytes(received)
        return line


@asynccontextmanager
async def open_offline(*arguments: str) -> AsyncIterator[Offline]:
    """Run the process for as long as the block; ``CalledProcessError``, in a group, if it fails."""
    command = [sys.executable, "-m", "benchmarks.offline", *(arguments or [MODEL_PATH])]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    async with trio.open_nursery() as nursery:

        async def run(*, task_status: trio.TaskStatus[trio.Process]) -> None:
            await trio.run_process(command, cwd=ROOT, task_status=task_status, **pipes)

        process = await nursery.start(run)
        yield Offline(process)
        nursery.cancel_scope.cancel(reason="the block is left")


Compute: TypeAlias = Callable[[Any], Awaitable[np.ndarray]]
"""Computes the vectors of one batch, in the form in which its way takes it."""


@define(eq=False, slots=False)
class Model:
    """Everything that is loaded, each part when it is first needed."""

    arguments: Sequence[str]
    texts: Texts = Factory(lambda self: Texts(self.arguments[0]), takes_self=True)
    checked: dict[tuple[Any, ...], float] = field(factory=dict)
    """The least cosine with the oracle, by way, threads, batch and tokens."""
    _opened: dict[int, Any] = field(factory=dict)
    _made: dict[tuple[int, int], list[list[str]]] = field(factory=dict)

    def batches(self, size: int, tokens: int) -> list[list[str]]:
        """Return texts in batches, the same on every call."""
        if (size, tokens) not in self._made:
            self._made[size, tokens] = [self.texts.make(size, tokens) for _ in range(BATCHES_OF_TEXTS)]
        return self._made[size, tokens]

    def prepare(self, job: OfflineJob, batches: list[list[str]]) -> tuple[str, Compute, list[Any]]:
        """Return the name of what computes a batch, itself, and the batches as it takes them."""
        if job.way == "text":
            return "our runner, from texts", self._from_texts, batches
        graph = graph_of(self._served[1])
        if graph is None:
            return "torch", self._launch, [[self._render(text) for text in texts] for texts in batches]
        if job.threads not in self._opened:
            self._opened[job.threads] = open_graph(graph, job.threads)
        names, compute = self._opened[job.threads]
        return graph.name, _as_async(compute), [inputs_of(self.texts.ids(texts), names) for texts in batches]

    async def _from_texts(self, texts: list[str]) -> np.ndarray:
        return await self._launch([self._render(text) for text in texts])

    def _render(self, text: str) -> Any:
        from trio_pool_serve.prompts import RenderingParams, TextPrompt
        from trio_pool_serve.types import PoolingRequest

        return PoolingRequest(self._served[0].render(TextPrompt(text), RenderingParams()))

    async def _launch(self, requests: list[Any]) -> np.ndarray:
        from trio_pool_serve.types import Batch

        rows = await self._served[1].launch(Batch(tuple(requests)))
        return np.stack([row[0] for row in rows])

    @cached_property
    def _served(self) -> tuple[Any, Any]:
        """The renderer and the runner of a server with these arguments."""
        from trio_pool_serve.cli import read_config
        from trio_pool_serve.engine.process_placement import replicas_of
        from trio_pool_serve.models.folder import read_model_folder
        from trio_pool_serve.models.loading.renderer_loading import text_renderer_of
        from trio_pool_serve.models.loading.runner_loader import load_transformer
        from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
        from trio_pool_serve.threads.offload import Offload
        from trio_pool_serve.types import RunnerParams

        config = read_config(self.arguments)
        loading, threads = config.sources[0].loading, replicas_of(config)
        folder = read_model_folder(Path(config.models[0]), loading)
        renderer = text_renderer_of(folder, load_tokenizer(folder, trust_remote_code=False), workers=1)
        # As in a server, but for the thread that waits for copies: there is no event loop to keep free.
        prepare = load_transformer(folder, loading, Offload(launch=threads, in_threads=False))
        return renderer, prepare(RunnerParams(config.scheduling.wanted_batch_tokens))


def _as_async(compute: Callable[[Any], np.ndarray]) -> Compute:
    async def computed(inputs: Any) -> np.ndarray:
        return compute(inputs)

    return computed


async def do_job(model: Model, job: OfflineJob) -> OfflineResult:
    """Check a batch's vectors, once, then compute batches for the requested time. Raises ``WrongAnswerError``."""
    import torch

    torch.set_num_threads(job.threads)
    batches = model.batches(job.batch, job.tokens)
    by, compute, inputs = model.prepare(job, batches)
    what = (job.way, job.threads, job.batch, job.tokens)
    if what not in model.checked:
        vectors = await compute(inputs[0])
        oracle = oracle_vectors(batches[0], model.arguments[0])
        model.checked[what] = check_vectors(vectors, oracle, job.least_cosine)
        gc.collect()
        gc.freeze()
    turns: Iterator[Any] = cycle(inputs)
    began = time.perf_counter()
    for _ in range(WARM_UP_BATCHES):
        if time.perf_counter() < began + WARM_UP_S:
            await compute(next(turns))
    times: list[float] = []
    spent, ends = time.process_time(), time.perf_counter() + job.seconds
    while not times or time.perf_counter() < ends:
        time.sleep(job.pause_s)  # noqa: ASYNC251  (nothing else runs here)
        began = time.perf_counter()
        await compute(next(turns))
        times.append(time.perf_counter() - began)
    return OfflineResult(
        by=by,
        batches=len(times),
        batch=job.batch,
        p50_ms=1e3 * median(times),
        cpu_ms=1e3 * (time.process_time() - spent) / len(times),
        least_cosine=model.checked[what],
    )


async def main() -> None:
    """Do jobs until there are no more."""
    model = Model(sys.argv[1:])
    for line in sys.stdin.buffer:
        result = await do_job(model, msgspec.json.decode(line, type=OfflineJob))
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    trio.run(main)
