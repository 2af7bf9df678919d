"""What do a batch, a request, a row and an idle link cost? The constants of the capacity model.

Processor time, not elapsed time, so that it matters less what else the machine does; caches are shared all the same.
Batches: the packaged model on one core. Requests: the event loop of an API process whose engine is another process.
Links: both ends of connections over which nothing but heartbeats is sent, as often as between machines, but over Unix
sockets.

    python -m benchmarks.scaling_constants
"""

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import attrs
import cyclopts
import numpy as np
import trio
from attrs import frozen
from cyclopts import Parameter

from benchmarks.answers import embeddings_body
from benchmarks.engine_rows import instant
from benchmarks.load import LoadJob, run_load
from benchmarks.model import MODEL_PATH, Texts
from benchmarks.report import RESULTS, Report, open_steps, print_table
from benchmarks.server_state import total_of
from benchmarks.servers import open_ours
from tests.engine.engines import linked_engine
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.engine.remote.connectors import unix_connector
from trio_pool_serve.engine.remote.device_server import ApiConnection, DeviceServer
from trio_pool_serve.engine.remote.wire import ToEngine
from trio_pool_serve.processes.framed_stream import FramedStream
from trio_pool_serve.telemetry.metrics import Metrics
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Batch, PoolingRequest, RenderedPrompt, RunnerParams

ANSWERED = "trio_pool_serve_requests_total"

LINK_TIMEOUT_S = 1.5
"""As ``host_connector`` has it by default."""

SHAPES = ((1, 16), (4, 16), (16, 16), (64, 16), (1, 128), (4, 128), (16, 128), (1, 512), (4, 512))
"""Rows and tokens of each of the batches."""

TOKENS, ROWS_OF_SEVERAL, CLIENTS = 64, 8, 8
"""Of requests: tokens of a text, texts of a request with several, and how many are sent at a time."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings: ``repeats`` of each batch, ``seconds`` of requests and of ``links`` idle links, in each round."""

    rounds: int = 3
    repeats: int = 9
    seconds: float = 5.0
    links: int = 100
    output_dir: Path = RESULTS


@frozen(kw_only=True)
class Constants:
    """Seconds of processor time on one core."""

    fixed_s: float
    """Fixed time of a batch, besides its tokens."""
    seconds_per_token: float
    fit_error: float
    """The largest relative deviation of a batch from that line."""
    request_s: float
    """An API process's event loop, for a request with one text."""
    row_s: float
    """The same, for each further text of a request."""
    link_api_s: float
    """An API process's event loop, for each second of an idle link."""
    link_engine_s: float
    """The same of an engine's."""


def measure_batches(repeats: int) -> list[float]:
    """Return the processor time of a batch of each of ``SHAPES``. In a process of its own, which is bound to a core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from trio_pool_serve.models.folder import read_model_folder
    from trio_pool_serve.models.loading.runner_loader import load_transformer

    config = ModelConfig()
    runner = load_transformer(read_model_folder(Path(MODEL_PATH), config), config, Offload())(RunnerParams())
    random = np.random.default_rng(0)
    shapes = [random.integers(1000, 20000, shape, np.int32) for shape in SHAPES]
    batches = [Batch(tuple([PoolingRequest(RenderedPrompt(row)) for row in rows])) for rows in shapes]

    async def measure() -> list[float]:
        medians = []
        for batch in batches:
            spent = []
            for _ in range(repeats + 1):
                began = time.process_time()
                await runner.launch(batch)
                spent.append(time.process_time() - began)
            medians.append(median(spent[1:]))
        return medians

    return trio.run(measure)


def fit(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return the line through the batches' times that errs least in proportion: constant, slope, largest error."""
    terms = np.array([[1.0, rows * tokens] for rows, tokens in SHAPES]) / np.array(seconds)[:, None]
    (fixed, slope), *_ = np.linalg.lstsq(terms, np.ones(len(SHAPES)), rcond=None)
    return float(fixed), float(slope), float(np.abs(terms @ (fixed, slope) - 1).max())


async def measure_requests(seconds: float) -> tuple[float, float]:
    """Return the time of the API's event loop for a request with one text, and for each further text."""
    texts = Texts().make(64 * ROWS_OF_SEVERAL, TOKENS)
    costs = []
    async with open_ours("--engine", "process", "--replicas", "1") as server:
        for rows in (1, ROWS_OF_SEVERAL):
            inputs = [texts[begin : begin + rows] for begin in range(0, len(texts), rows)]
            bodies = [embeddings_body(each, encoding_format="base64") for each in inputs]
            job = LoadJob(port=server.port, bodies=bodies, clients=CLIENTS, seconds=seconds, ramp_s=0.0)
            await run_load(attrs.evolve(job, seconds=min(1.0, seconds)))
            loop_s, answered = _loop_s(server.pid), await total_of(server, ANSWERED)
            await run_load(job)
            costs.append((_loop_s(server.pid) - loop_s) / (await total_of(server, ANSWERED) - answered))
    return costs[0], (costs[1] - costs[0]) / (ROWS_OF_SEVERAL - 1)


def _loop_s(pid: int) -> float:
    """Return the processor time of a process's first thread."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def measure_links(links: int, seconds: float) -> tuple[float, float]:
    """Return the time that both ends of an idle link take in a second: the API process's, and the engine's."""
    spent: dict[str, float] = {}

    async def measure_thread(name: str) -> None:
        await trio.sleep(1.0)  # all links are ready
        began, began_at = time.thread_time(), trio.current_time()
        await trio.sleep(seconds)
        spent[name] = (time.thread_time() - began) / (trio.current_time() - began_at) / links

    async def serve(path: Path) -> None:
        server = DeviceServer(
            load=lambda: lambda _: instant(384), offload=Offload(launch=1), metrics=Metrics().of_engine("m")
        )

        async def serve_one(stream: trio.SocketStream) -> None:
            framed: FramedStream[ToEngine] = FramedStream(stream, ToEngine)
            await ApiConnection(server, framed, LINK_TIMEOUT_S).serve()

        with trio.socket.socket(trio.socket.AF_UNIX) as listening:
            await listening.bind(str(path))
            listening.listen(links)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.run)
                await server.dispatcher.wait_ready()
                nursery.start_soon(trio.serve_listeners, serve_one, [trio.SocketListener(listening)])
                is_listening.set()
                await measure_thread("engine")
                nursery.cancel_scope.cancel()

    async def connect(path: Path) -> None:
        connectors = [attrs.evolve(unix_connector(path), timeout_s=LINK_TIMEOUT_S) for _ in range(links)]
        api = linked_engine(connectors)
        async with trio.open_nursery() as nursery:
            await nursery.start(api.run)
            await measure_thread("api")
            nursery.cancel_scope.cancel()

    is_listening = threading.Event()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "engine"
        other = threading.Thread(target=trio.run, args=(serve, path))
        other.start()
        is_listening.wait()
        trio.run(connect, path)
        other.join()
    return spent["api"], spent["engine"]


def measure(settings: Settings) -> tuple[Constants, list[float]]:
    """Return the constants of one round, and the times of the batches."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        batches = process.submit(measure_batches, settings.repeats).result()
    fixed_s, seconds_per_token, fit_error = fit(batches)
    request_s, row_s = trio.run(measure_requests, settings.seconds)
    link_api_s, link_engine_s = measure_links(settings.links, settings.seconds)
    constants = Constants(
        fixed_s=fixed_s,
        seconds_per_token=seconds_per_token,
        fit_error=fit_error,
        request_s=request_s,
        row_s=row_s,
        link_api_s=link_api_s,
        link_engine_s=link_engine_s,
    )
    return constants, batches


def middle(found: Sequence[Constants]) -> Constants:
    """Return the median of each constant."""
    names = attrs.fields_dict(Constants)
    return Constants(**{name: median(getattr(each, name) for each in found) for name in names})


def main(settings: Settings = Settings()) -> None:
    """Measure the constants."""
    report = Report("scaling_constants", settings)
    rounds, batches = [], []
    with open_steps("constants", settings.rounds) as step:
        for number in range(settings.rounds):
            step(f"round {number + 1}")
            constants, times = measure(settings)
            rounds.append(constants)
            batches.append(times)
    constants = middle(rounds)
    print_table(
        "Processor time on one core",
        ["constant", "median", "least", "most"],
        [
            [name, *(f"{value:.4g}" for value in (getattr(constants, name), min(values), max(values)))]
            for name in attrs.fields_dict(Constants)
            for values in [[getattr(each, name) for each in rounds]]
        ],
    )
    print_table(
        "Batches",
        ["rows × tokens", "ms", "least", "most", "the line's ms", "tokens/s"],
        [
            [
                f"{rows} × {tokens}",
                *(f"{1e3 * each:.1f}" for each in (typical, min(seconds), max(seconds))),
                f"{1e3 * (constants.fixed_s + rows * tokens * constants.seconds_per_token):.1f}",
                f"{rows * tokens / typical:.0f}",
            ]
            for (rows, tokens), *seconds in zip(SHAPES, *batches, strict=True)
            for typical in [median(seconds)]
        ],
    )
    report.write(
        constants=attrs.asdict(constants),
        rounds=[attrs.asdict(each) for each in rounds],
        batches_s=[dict(zip(map("{0[0]} × {0[1]}".format, SHAPES), times, strict=True)) for times in batches],
    )


if __name__ == "__main__":
    cyclopts.run(main)
