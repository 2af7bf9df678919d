"""What does a request of one text cost an API process whose engine returns at once? Measured over real connections.

``trio-pool-serve serve`` with one API process, and a runner whose vectors of 768 numbers are there at once: in an
engine process, or in a thread of the API process. A text of 34 tokens per request. The processor time is that of the
API process alone, all its threads: other processes that want its core make requests/s lower, and leave this as it is.

    python -m benchmarks.api_rate
    python -m benchmarks.api_rate --before ../earlier-checkout    # which is measured in turns with this one
"""

from contextlib import AsyncExitStack
from pathlib import Path

import cyclopts
from attrs import define, evolve, frozen
from cyclopts import Parameter

from benchmarks.answers import ask, embeddings_body, vectors_of
from benchmarks.instant_server import DIMENSIONS
from benchmarks.load import LoadJob, run_load
from benchmarks.model import MODEL_NAME, MODEL_PATH, Texts, WrongAnswerError
from benchmarks.report import RESULTS, Names, Report, command_of, open_steps, print_table
from benchmarks.rounds import Rounds
from benchmarks.servers import ROOT, Server, open_server
from benchmarks.thread_clocks import clocks_since, read_clocks

TOKENS, TEXTS = 34, 512

HERE, BEFORE = "this", "before"


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings: ``seconds`` of load in each round, for each of ``engines`` and ``formats``."""

    rounds: int = 5
    seconds: float = 5.0
    clients: int = 32
    engines: Names = ("process", "local")
    formats: Names = ("base64", "float")
    before: Path | None = None
    output_dir: Path = RESULTS


@define
class Rate:
    """What the clients of one load saw, and the processor time of the API process per request."""

    requests_per_s: float
    p50_ms: float
    api_us: float
    loop_us: float


async def measure(server: Server, bodies: list[str], settings: Settings) -> Rate:
    """Load a server. Cancellation: at once."""
    job = LoadJob(port=server.port, bodies=bodies, clients=settings.clients, seconds=settings.seconds, ramp_s=0.0)
    before = read_clocks(server.pid)
    load = await run_load(job)
    spent = {
        thread: clock.cpu_s for (pid, thread), clock in clocks_since(before, server.pid).items() if pid == server.pid
    }
    request_us = 1e6 / load.requests
    return Rate(
        load.requests_per_s, load.p50_ms, sum(spent.values()) * request_us, spent.get(server.pid, 0.0) * request_us
    )


async def run(settings: Settings) -> None:
    """Measure every engine and format, in turns with the checkout before."""
    report = Report("api_rate", settings)
    checkouts = {HERE: ROOT} | ({BEFORE: settings.before} if settings.before else {})
    texts = Texts().make(TEXTS, TOKENS)
    bodies = {each: [embeddings_body(text, encoding_format=each) for text in texts] for each in settings.formats}
    rounds: Rounds[tuple[str, str, str]] = Rounds()
    for engine in settings.engines:
        async with AsyncExitStack() as stack:
            command = ["benchmarks.instant_server", f"{MODEL_NAME}={MODEL_PATH}", "--engine", engine, "--replicas", "1"]
            servers = {
                name: await stack.enter_async_context(open_server(name, command, ready_path="/readyz", cwd=folder))
                for name, folder in checkouts.items()
            }
            for server in servers.values():
                for each in settings.formats:
                    await check(server, bodies[each][0])
                    await measure(server, bodies[each], evolve(settings, seconds=0.5))
            with open_steps(engine, settings.rounds) as step:
                for number in range(settings.rounds):
                    step(f"round {number + 1}")
                    for each in settings.formats:
                        for name in [*servers] if number % 2 else [*reversed(servers)]:
                            rounds.add((engine, each, name), await measure(servers[name], bodies[each], settings))
    columns = ["engine", "format", "checkout", "requests/s", "p50 ms", "API process µs", "of it its event loop µs"]
    if settings.before:
        columns.append("times the cost before")
    table = [
        [
            *key,
            *(f"{rounds.median(key, each):.{digits}f}" for each, digits in QUANTITIES),
            *([f"{rounds.ratio(key, 'api_us', (*key[:2], BEFORE)):.2f}"] if settings.before else []),
        ]
        for key in sorted(rounds.results)
    ]
    print_table("Requests of one text to one API process", columns, table)
    report.write(
        {"before": settings.before and settings.before.name}, rates=rounds.as_document("engine", "format", "checkout")
    )


QUANTITIES = (("requests_per_s", 0), ("p50_ms", 1), ("api_us", 0), ("loop_us", 0))


async def check(server: Server, body: str) -> None:
    """Raise ``WrongAnswerError`` unless the server answers with the runner's vectors."""
    if (shape := vectors_of((await ask(server.url, body)).json()).shape) != (1, DIMENSIONS):
        raise WrongAnswerError(f"the vectors of {server.name} have the shape {shape}")


main = command_of(run)

if __name__ == "__main__":
    cyclopts.run(main)
