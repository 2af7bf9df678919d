"""What do open consoles cost? Requests/s under load, with viewers of ``/console/live`` and without, in turns.

Viewers read samples as the page does; browsers would take the cores of this machine, which serve as well.

    python -m benchmarks.consoles
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import cyclopts
import httpx
import trio
from attrs import frozen
from cyclopts import Parameter

from benchmarks.answers import bodies_of
from benchmarks.load import LoadJob, run_load
from benchmarks.machine import describe_machine
from benchmarks.model import Texts
from benchmarks.report import RESULTS, open_steps, print_table, settings_document, warn_if_busy, write_json
from benchmarks.rounds import Rounds
from benchmarks.servers import Server
from benchmarks.variants import OURS, open_variants

TOKENS = 34

AIM = 0.98
"""Of the requests/s without viewers."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """What is run: in each round ``seconds`` of load without viewers, and as many with them."""

    rounds: int = 7
    seconds: float = 8.0
    clients: int = 32
    viewers: int = 5
    output_dir: Path = RESULTS


@asynccontextmanager
async def watched(server: Server, viewers: int) -> AsyncIterator[list[int]]:
    """Have so many viewers for as long as the block; gives the number of events that each has read."""
    events = [0] * viewers

    async def view(number: int, *, task_status: trio.TaskStatus[None]) -> None:
        # No limit of time: samples come for as long as they are read.
        async with (
            httpx.AsyncClient(timeout=None) as client,
            client.stream("GET", f"{server.url}/console/live") as response,
        ):
            response.raise_for_status()
            task_status.started()
            async for line in response.aiter_lines():
                events[number] += line.startswith("data: ")

    async with trio.open_nursery() as nursery:
        for number in range(viewers):
            await nursery.start(view, number)
        yield events
        nursery.cancel_scope.cancel(reason="the block is left")


async def measure(settings: Settings) -> Rounds[int]:
    """Return the results of all rounds by the number of viewers. Cancellation: at once."""
    bodies = bodies_of(Texts().make(256, TOKENS))
    rounds: Rounds[int] = Rounds()
    async with open_variants([OURS]) as servers:
        (server,) = servers.values()
        job = LoadJob(port=server.port, bodies=bodies, clients=settings.clients, seconds=settings.seconds)
        await run_load(attrs.evolve(job, seconds=3.0))  # the first batches are slower
        with open_steps("consoles", 2 * settings.rounds) as step:
            for _ in range(settings.rounds):
                for viewers in (0, settings.viewers):
                    step(f"{viewers} viewers")
                    async with watched(server, viewers) as events:
                        rounds.add(viewers, await run_load(job))
                    if viewers and min(events) < settings.seconds / 2:
                        raise RuntimeError(f"Viewers have got {events} samples.")
    return rounds


def main(settings: Settings = Settings()) -> None:
    """Measure, print, and write ``consoles.json``."""
    machine = describe_machine()
    warn_if_busy(machine)
    rounds = trio.run(measure, settings)
    ratio = rounds.ratio(settings.viewers, "requests_per_s", 0)
    rows = [
        [str(viewers), f"{rounds.median(viewers, 'requests_per_s'):.1f}", f"{rounds.median(viewers, 'p99_ms'):.1f}"]
        for viewers in (0, settings.viewers)
    ]
    title = f"{settings.viewers} viewers ÷ none: {ratio:.3f} of the requests/s; the aim is {AIM}"
    print_table(title, ["viewers", "requests/s", "p99, ms"], rows)
    document = {
        "machine": machine,
        "settings": settings_document(settings),
        "results": rounds.as_document("viewers"),
        "ratio": ratio,
        "aim": AIM,
    }
    write_json(settings.output_dir, "consoles", document)


if __name__ == "__main__":
    cyclopts.run(main)
