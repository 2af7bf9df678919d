"""What does it cost that an engine is on another machine? Requests/s and latency over TCP, against a Unix socket.

The same model in an engine process behind a Unix socket, and in ``trio-pool-serve engine`` in a network namespace, to
which a virtual cable leads. Both are loaded in turns. Then the cable is cut under load: how long until every request
that was there is told, and how long until all is well once it is mended?

    python -m benchmarks.engine_links
"""

import itertools
import math
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from secrets import token_hex
from typing import Literal

import attrs
import cyclopts
import trio
from attrs import define, field, frozen
from cyclopts import Parameter

from benchmarks.answers import embeddings_body
from benchmarks.bert_shapes import write_bert
from benchmarks.load import LoadJob, run_load
from benchmarks.model import MODEL_NAME, MODEL_PATH, Texts
from benchmarks.remote_engines import NoNamespacesError, cut, mend, open_engine, open_machine
from benchmarks.report import RESULTS, Numbers, Report, console, open_steps, print_table
from benchmarks.rounds import Rounds, median_difference
from benchmarks.servers import Server, open_server
from trio_pool_serve.load.client_connection import Response, Target, request_bytes
from trio_pool_serve.load.load_run import LoadPlan, LoadRun

UNIX, CABLE = "Unix socket", "TCP, another namespace"

TOKENS, TEXTS = 34, 256

OWN = ("--engine", "process", "--replicas", "1")

CUT_CLIENTS = 8

BACK_TIMEOUT_S = 60.0


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """What is run; the cable is cut ``cuts`` times."""

    rounds: int = 5
    seconds: float = 8.0
    clients: Numbers = (1, 32)
    model: Literal["minilm", "tiny"] = "minilm"
    cuts: int = 5
    output_dir: Path = RESULTS


@define
class Cut:
    """What became of the requests around one cut of the cable; times in seconds."""

    slowest_s: float = 0.0
    """From sending a request to its answer, whatever that is."""
    back_s: float = 0.0
    """From the mending to the next 200."""
    ends: dict[str, int] = field(factory=dict)
    """Requests by status or, without a status, by the names of ``client_connection.py``."""


async def cut_under_load(server: Server, machine: str, body: str) -> Cut:
    """Cut the cable while clients send, and mend it after some refusals."""
    found = Cut()
    refused, back = trio.Event(), trio.Event()
    mended_at = math.inf

    def note_failure(outcome: str, _: str) -> None:
        if outcome == "503":
            refused.set()

    def note_response(_: Response) -> None:
        if trio.current_time() > mended_at and not back.is_set():
            found.back_s = trio.current_time() - mended_at
            back.set()

    request = request_bytes("/v1/embeddings", body.encode())
    target = Target(host="127.0.0.1", port=server.port)
    plan = LoadPlan(target=target, requests=[request], clients=CUT_CLIENTS, seconds=math.inf, timeout_s=60)
    load = LoadRun(plan, on_response=note_response, on_failure=note_failure)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(load.run)
        await trio.sleep(1.0)
        cut(machine)
        await refused.wait()
        await trio.sleep(1.0)
        mend(machine)
        mended_at = trio.current_time()
        with trio.fail_after(BACK_TIMEOUT_S):
            await back.wait()
        load.end = trio.current_time()  # the clients send no more
    found.slowest_s = max(itertools.chain.from_iterable(load.outcomes.values()))
    found.ends = {outcome: len(latencies) for outcome, latencies in load.outcomes.items()}
    return found


@frozen
class Compared:
    """The servers by their links, and the namespace of the last one."""

    servers: dict[str, Server]
    machine: str | None


async def open_compared(stack: AsyncExitStack, folder: Path, model: str) -> Compared:
    """Start both servers; the one with another namespace only where there can be one."""
    named = f"{MODEL_NAME}={model}"
    module = ["trio_pool_serve", "serve", named]
    servers = {UNIX: await stack.enter_async_context(open_server(UNIX, [*module, *OWN], ready_path="/readyz"))}
    try:
        machine = stack.enter_context(open_machine())
    except NoNamespacesError as error:
        console.print(f"no other namespace: {error}", style="yellow")
        return Compared(servers, None)
    key_file = folder / "key"
    key_file.write_text(token_hex(32))
    address = await stack.enter_async_context(open_engine(machine, named, key_file))
    flags = ("--engine-hosts", address, "--key-file", str(key_file))
    servers[CABLE] = await stack.enter_async_context(open_server(CABLE, [*module, *flags], ready_path="/readyz"))
    return Compared(servers, machine)


async def run(settings: Settings) -> tuple[Rounds[tuple[str, int]], list[Cut]]:
    """Measure. Cancellation: at once; servers are stopped."""
    rounds: Rounds[tuple[str, int]] = Rounds()
    cuts: list[Cut] = []
    bodies = [embeddings_body(text, encoding_format="base64") for text in Texts().make(TEXTS, TOKENS)]
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = MODEL_PATH if settings.model == "minilm" else str(write_bert(folder, "tiny"))
        compared = await open_compared(stack, folder, model)
        for server in compared.servers.values():
            await run_load(LoadJob(port=server.port, bodies=bodies, clients=8, seconds=1.0))
        with open_steps("loads", settings.rounds * len(settings.clients) * len(compared.servers)) as step:
            for number in range(settings.rounds):
                for clients in settings.clients:
                    names = list(compared.servers)
                    for name in names[number % len(names) :] + names[: number % len(names)]:
                        step(f"round {number + 1}: {name}, {clients} clients")
                        job = LoadJob(
                            port=compared.servers[name].port, bodies=bodies, clients=clients, seconds=settings.seconds
                        )
                        rounds.add((name, clients), await run_load(job))
        if compared.machine is not None:
            server, machine = compared.servers[CABLE], compared.machine
            cuts = [await cut_under_load(server, machine, bodies[0]) for _ in range(settings.cuts)]
    return rounds, cuts


def show(rounds: Rounds[tuple[str, int]], cuts: Sequence[Cut]) -> None:
    """Print the tables."""
    rows = []
    for name, clients in rounds.results:
        own, base = rounds.results[name, clients], rounds.results[UNIX, clients]
        rows.append(
            [
                name,
                str(clients),
                f"{rounds.median((name, clients), 'requests_per_s'):.0f}",
                f"{rounds.ratio((name, clients), 'requests_per_s', (UNIX, clients)):.3f}",
                f"{rounds.median((name, clients), 'p50_ms'):.2f}",
                f"{median_difference(own, base, 'p50_ms'):+.2f}",
                f"{rounds.median((name, clients), 'p99_ms'):.2f}",
            ]
        )
    columns = ["link", "clients", "requests/s", "against Unix", "p50 ms", "against Unix", "p99 ms"]
    print_table("Engines behind links", columns, rows)
    if cuts:
        print_table(
            "The cable is cut under load",
            ["cut", "slowest answer s", "back after s", "answers", "without an answer"],
            [
                [
                    str(number),
                    f"{each.slowest_s:.2f}",
                    f"{each.back_s:.2f}",
                    ", ".join(f"{count} of {end}" for end, count in sorted(each.ends.items()) if end.isdigit()),
                    str(sum(count for end, count in each.ends.items() if not end.isdigit())),
                ]
                for number, each in enumerate(cuts, 1)
            ],
        )


def main(settings: Settings = Settings()) -> None:
    """Compare the links, then cut one."""
    report = Report("engine_links", settings)
    rounds, cuts = trio.run(run, settings)
    show(rounds, cuts)
    report.write(loads=rounds.as_document("link", "clients"), cuts=[attrs.asdict(each) for each in cuts])


if __name__ == "__main__":
    cyclopts.run(main)
