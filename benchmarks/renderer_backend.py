"""Threads or processes? What texts and images take by either, and whether the loop stays free meanwhile.

Everything runs in one process, without HTTP and without a model: ``clients`` tasks have prompts rendered, each its
next when it has its last, while another task notes how late the loop wakes it from a sleep of a millisecond.

    python -m benchmarks.renderer_backend
"""

import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import attrs
import cyclopts
import numpy as np
import trio
from attrs import define, field, frozen
from cyclopts import Parameter

from benchmarks.images import PROCESSORS, encoded_image, image_features, prepare_processors
from benchmarks.machine import describe_machine
from benchmarks.model import MODEL_PATH, Texts, WrongAnswerError
from benchmarks.report import RESULTS, open_figure, open_progress, print_table, warn_if_busy, write_figure, write_json
from trio_pool_serve.config import ModelConfig, ThreadsConfig
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.processes.worker_processes import WorkerProcesses, prepare_worker
from trio_pool_serve.prompts import RenderingParams, TextPrompt
from trio_pool_serve.rendering.backend import ThreadBackend
from trio_pool_serve.rendering.process_backend import ProcessBackend
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.rendering.text.text_loading import TextRecipe, text_renderer_of
from trio_pool_serve.rendering.text.text_renderer import TextRenderer
from trio_pool_serve.rendering.text.tokenizer_loading import load_tokenizer
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import RenderedPrompt

TOKENS = 34

LARGE_BYTES = 10**6

BEAT_S = 0.001

ON_LOOP, THREADS, PROCESSES = "on the loop", "threads", "processes"


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """What is run: ``seconds`` for each work, backend and round."""

    rounds: int = 5
    seconds: float = 1.5
    workers: int = 2
    clients: int = 4
    output_dir: Path = RESULTS


@frozen
class Work:
    """Something to be rendered: one call makes ``items`` of ``unit``, and returns arrays to compare."""

    name: str
    unit: str
    items: int
    run: Callable[[Renderer], Awaitable[list[np.ndarray]]]


def works() -> list[Work]:
    """Return everything that is rendered."""
    texts = Texts().make(1024, TOKENS)
    large = " ".join(texts * (1 + LARGE_BYTES // len(" ".join(texts))))[:LARGE_BYTES]
    images = [
        Work(f"1 MP {form}, {processor.partition('Image')[0]}", "images", 1, partial(_image, encoded, processor))
        for form, encoded in ((form, encoded_image(form)) for form in ("JPEG", "PNG"))
        for processor in PROCESSORS
    ]
    return [
        Work(f"text of {TOKENS} tokens", "texts", 1, partial(_texts, texts[:1])),
        Work("1024 of them", "texts", 1024, partial(_texts, texts)),
        Work("text of 1 MB, in windows", "texts", 1, partial(_windows, large)),
        *images,
    ]


async def _texts(texts: list[str], renderer: Renderer) -> list[np.ndarray]:
    """As a request has them rendered: few more at once than there are workers."""
    rendered: dict[int, RenderedPrompt] = {}
    params = RenderingParams(truncate_to=256)

    async def some(first: int) -> None:
        for index in range(first, len(texts), step):
            rendered[index] = await renderer.render(TextPrompt(texts[index]), params)

    step = min(len(texts), 2 * renderer.workers)
    async with trio.open_nursery() as nursery:
        for first in range(step):
            nursery.start_soon(some, first)
    return [rendered[index].token_ids for index in range(len(texts))]


async def _windows(text: str, renderer: Renderer) -> list[np.ndarray]:
    (windows,) = await renderer.render_plain([(TextPrompt(text), RenderingParams(), True)])
    return [window.token_ids for window in windows]


async def _image(encoded: bytes, processor: str, renderer: Renderer) -> list[np.ndarray]:
    features = await renderer.backend.run("media", image_features, encoded, processor)
    return list(features.arrays.values())


Contenders: TypeAlias = dict[str, Renderer]


def prepare(texts: TextRenderer) -> None:
    """Make a process ready for all works."""
    prepare_worker(texts)
    prepare_processors()


@asynccontextmanager
async def open_contenders(workers: int) -> AsyncIterator[Contenders]:
    """Give the same renderer over every backend; the processes are ready."""
    path, loading = Path(MODEL_PATH), ModelConfig()
    folder = read_model_folder(path, loading)
    texts = text_renderer_of(folder, load_tokenizer(folder), workers=workers, recipe=TextRecipe(path, loading))
    on_loop, threads = Offload(in_threads=False), Offload(render=workers, media=workers)
    processes = WorkerProcesses(workers, partial(prepare, texts))
    prepare_processors()
    async with trio.open_nursery() as nursery:
        await nursery.start(processes.run)
        await processes.start()
        yield {
            ON_LOOP: Renderer(texts, on_loop, ThreadBackend(on_loop)),
            THREADS: Renderer(texts, threads, ThreadBackend(threads)),
            PROCESSES: Renderer(texts, threads, ProcessBackend(processes, processes)),
        }
        nursery.cancel_scope.cancel(reason="all has been measured")


async def check(todo: list[Work], contenders: Contenders) -> None:
    """Raise ``WrongAnswerError`` unless all contenders make the same of everything."""
    for work in todo:
        expected = await work.run(contenders[ON_LOOP])
        for name, renderer in contenders.items():
            found = await work.run(renderer)
            if len(found) != len(expected) or not all(map(np.array_equal, found, expected)):
                raise WrongAnswerError(f"{work.name}: {name} makes something else of it")


@frozen
class Round:
    """One work by one contender for a while: latency of a call, and by how much the loop was late."""

    items_per_s: float
    p50_ms: float
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float


async def observe(work: Work, renderer: Renderer, settings: Settings) -> Round:
    """Keep the clients busy with one work; what they have begun is finished."""
    latencies: list[float] = []
    lags: list[float] = []
    began = time.perf_counter()
    end = began + settings.seconds

    async def client() -> None:
        while time.perf_counter() < end:
            asked = time.perf_counter()
            await work.run(renderer)
            latencies.append(time.perf_counter() - asked)

    async with trio.open_nursery() as beating:
        beating.start_soon(_beat, lags)
        async with trio.open_nursery() as clients:
            for _ in range(settings.clients):
                clients.start_soon(client)
        took = time.perf_counter() - began
        await trio.sleep(2 * BEAT_S)  # the last stall shows when it is over
        beating.cancel_scope.cancel(reason="the round is over")
    p50, p99, longest = (1e3 * float(value) for value in np.percentile(lags, (50, 99, 100)))
    return Round(work.items * len(latencies) / took, 1e3 * median(latencies), p50, p99, longest)


async def _beat(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + BEAT_S
        await trio.sleep(BEAT_S)
        lags.append(max(0.0, time.perf_counter() - due))


@define
class Observations:
    """All rounds of one work by one contender."""

    rounds: list[Round] = field(factory=list)

    def of(self, quantity: str) -> float:
        """Return the median over the rounds, but the largest of the maxima."""
        over: Callable[[list[float]], float] = max if quantity == "lag_max_ms" else median
        return over([getattr(one, quantity) for one in self.rounds])


Measured: TypeAlias = dict[tuple[str, str], Observations]
"""By work and contender."""


async def measure(todo: list[Work], contenders: Contenders, settings: Settings) -> Measured:
    """Give every contender every work in turns, round after round."""
    measured: Measured = defaultdict(Observations)
    with open_progress() as progress:
        task = progress.add_task("", total=settings.rounds * len(todo) * len(contenders))
        for _ in range(settings.rounds):
            for work in todo:
                for name, renderer in contenders.items():
                    progress.update(task, description=f"{work.name}: {name}")
                    measured[work.name, name].rounds.append(await observe(work, renderer, settings))
                    progress.advance(task)
    return measured


def show(todo: list[Work], measured: Measured) -> None:
    """Print the table."""
    columns = ["what", "where", "items/s", "of threads", "p50 ms", "lag p50 ms", "lag p99 ms", "lag max ms"]
    rows = [
        [
            work.name,
            name,
            f"{seen.of('items_per_s'):.4g} {work.unit}",
            f"{seen.of('items_per_s') / measured[work.name, THREADS].of('items_per_s'):.2f}",
            *(f"{seen.of(quantity):.2f}" for quantity in ("p50_ms", "lag_p50_ms", "lag_p99_ms", "lag_max_ms")),
        ]
        for work in todo
        for name, seen in ((name, measured[work.name, name]) for name in (ON_LOOP, THREADS, PROCESSES))
    ]
    print_table("threads or processes?", columns, rows)


def draw(todo: list[Work], measured: Measured, settings: Settings) -> None:
    """Plot throughput as a share of that of threads, and the loop's lag."""
    figure, (throughput, lag) = open_figure(2)
    places = np.arange(len(todo))
    for number, name in enumerate((ON_LOOP, THREADS, PROCESSES)):
        at = places + 0.27 * (number - 1)
        seen = [measured[work.name, name] for work in todo]
        base = [measured[work.name, THREADS].of("items_per_s") for work in todo]
        shares = [one.of("items_per_s") / of_threads for one, of_threads in zip(seen, base, strict=True)]
        throughput.barh(at, shares, height=0.25, label=name)
        lag.barh(at, [one.of("lag_p99_ms") for one in seen], height=0.25, label=name)
    for axis in (throughput, lag):
        axis.set_yticks(places, [work.name for work in todo])
        axis.invert_yaxis()
    throughput.set(xlabel="of the throughput with threads")
    throughput.set_title("Items per second")
    throughput.legend(frameon=False)
    lag.set(xscale="log", xlabel="ms, p99")
    lag.set_title("How late the loop is meanwhile")
    write_figure(figure, settings.output_dir, "renderer_backend")


async def run(settings: Settings) -> None:
    """Measure and report."""
    machine = describe_machine()
    warn_if_busy(machine)
    sys.setswitchinterval(ThreadsConfig().switch_interval_s)  # as the service does
    todo = works()
    async with open_contenders(settings.workers) as contenders:
        await check(todo, contenders)
        measured = await measure(todo, contenders, settings)
    show(todo, measured)
    document: dict[str, Any] = {
        "machine": machine,
        "settings": attrs.asdict(settings, filter=lambda attribute, _: attribute.name != "output_dir"),
        "measured": [
            {"work": work, "backend": name, "rounds": [attrs.asdict(one) for one in seen.rounds]}
            for (work, name), seen in measured.items()
        ],
    }
    write_json(settings.output_dir, "renderer_backend", document)
    draw(todo, measured, settings)


def main(settings: Settings = Settings()) -> None:
    """Compare threads with processes for rendering."""
    trio.run(run, settings)


if __name__ == "__main__":
    cyclopts.run(main)
