"""Is every request accounted for, whatever clients, batches and processes do? 10,000 requests, half of them unkind.

Clients leave before the body, in the queue and on the device; they close their sending half; they send what cannot be
computed, bytes that are no HTTP, and heads that never end. Batches raise, run out of memory or take too long
(``chaotic_runner.py``), and engine processes are killed. Each request must end: with a status, or because its client
left. Afterwards nothing may be queued, admitted or borrowed, and memory must be what it was after the first thousand.

    python -m benchmarks.chaos
    python -m benchmarks.chaos --requests 500 --warm 100 --kills 1 --seed 7

Requests are the same for the same seed; what happens at the same time is not. The exit status is 1 if a promise is
broken.
"""

import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import cyclopts
import httpx
import trio
from attrs import define, field, frozen
from cyclopts import Parameter

from benchmarks.bert_shapes import Shape, write_bert
from benchmarks.chaotic_runner import SEED
from benchmarks.memory import memory_of
from benchmarks.model import MODEL_PATH
from benchmarks.report import RESULTS, Report, open_figure, open_progress, print_table, write_figure
from benchmarks.server_state import SETTLE_S, busy_of, total_of
from benchmarks.servers import READY_TIMEOUT_S, Server, open_server
from benchmarks.thread_clocks import process_tree
from benchmarks.unkind_requests import BAD_INPUT, HOSTILE, KIND, MODEL, Plan, plan

ENGINE_PROCESS = b"trio_pool_serve.server.engine_process"

REPLICAS = 2

FLAGS = (
    *("--engine", "process", "--replicas", str(REPLICAS), "--enable-prompt-embeds", "--max-model-len", "512"),
    *("--client-timeout-s", "10", "--batch-timeout-s", "60"),
)

BOUND_S = 60.0
"""Nothing may take longer: more than any limit of the server that applies here."""

MOST_GROWTH = 1.05

LEAST_WARM = 1000
"""Requests before which memory is expected to grow."""

LEFT, HALF, CLOSED, CUT, HUNG, REFUSED = "left", "half-closed", "closed", "cut off", "hung", "no connection"
"""How a request ends without a status: its client left; its client closed its sending half, which the server took for
leaving; the server closed a connection that was hostile, or one that was not; nothing happened; it was not accepted."""

BROKEN = (CUT, HUNG, REFUSED)


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings: ``requests`` of ``clients``; memory is read after the first ``warm``, and at the end.

    Between those, engine processes are killed ``kills`` times.
    """

    rounds: int = 1
    requests: int = 10_000
    warm: int = 1000
    clients: int = 32
    kills: int = 10
    seed: int = 0
    idle_s: float = 20.0
    model: Literal["minilm"] | Shape = "tiny"
    output_dir: Path = RESULTS

    def __attrs_post_init__(self) -> None:
        if not 0 < self.warm < self.requests:
            raise ValueError("--warm has to be less than --requests")


@define
class Ledger:
    """How the requests of each kind ended."""

    ends: dict[str, Counter[str]] = field(factory=dict)

    def enter(self, kind: str, end: str) -> None:
        """Count one request."""
        self.ends.setdefault(kind, Counter())[end] += 1

    @property
    def total(self) -> Counter[str]:
        """The ends of all requests."""
        return sum(self.ends.values(), Counter())

    @property
    def sent(self) -> int:
        """All requests."""
        return self.total.total()

    def count(self, *ends: str) -> int:
        """Return how many requests ended so."""
        return sum(self.total[end] for end in ends)


@define
class Story:
    """One server: its requests, and its state afterwards."""

    ledger: Ledger = field(factory=Ledger)
    kills: int = 0
    warm_requests: int = 0
    warm_mib: float = 0.0
    end_mib: float = 0.0
    busy: dict[str, float] = field(factory=dict)
    """What was still going on at the end."""
    accepted_bad: list[str] = field(factory=list)
    """Bad input that was answered with something else than a 4xx."""
    still_answers: bool = False

    def promises(self) -> list[tuple[str, str, bool]]:
        """Return what has to be so, what was, and whether that is the same."""
        ledger, growth = self.ledger, self.end_mib / self.warm_mib
        statuses = sum(count for end, count in ledger.total.items() if end.isdigit())
        gone = ledger.count(LEFT, HALF, CLOSED)
        innocent = sum(self.ledger.ends.get(kind, Counter())["500"] for kind in KIND)
        promises = [
            (
                "answered + failed with a status + client gone = sent",
                f"{ledger.count('200')} + {statuses - ledger.count('200')} + {gone} of {ledger.sent}",
                statuses + gone == ledger.sent,
            ),
            ("nothing hangs", f"{ledger.count(HUNG)} hung", ledger.count(HUNG) == 0),
            ("requests without fault get no 500", f"{innocent} did", innocent == 0),
            ("bad input is refused with a 4xx", f"{len(self.accepted_bad)} not", not self.accepted_bad),
            ("afterwards nothing is queued, admitted or borrowed", str(self.busy or "nothing"), not self.busy),
            ("afterwards a request is answered", str(self.still_answers), self.still_answers),
        ]
        if self.warm_requests >= LEAST_WARM:
            promises.append(
                (f"memory grows by {MOST_GROWTH - 1:.0%} at most", f"{growth - 1:+.1%}", growth <= MOST_GROWTH)
            )
        return promises

    def broken(self) -> list[str]:
        """Return the promises that were not kept."""
        return [promise for promise, _, kept in self.promises() if not kept]


async def send(server: Server, planned: Plan) -> str:
    """Send one request as planned and return how it ended. Cancellation: at once."""
    with trio.move_on_after(BOUND_S):
        try:
            stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        except OSError:
            return REFUSED
        async with stream:
            try:
                return await _carry_out(stream, planned)
            except trio.BrokenResourceError:
                return CLOSED if planned.kind in HOSTILE else CUT
    return HUNG


async def _carry_out(stream: trio.SocketStream, planned: Plan) -> str:
    for part in planned.parts:
        try:
            await stream.send_all(part)
        except trio.BrokenResourceError:
            break  # it may have been answered before its end
        await trio.sleep(planned.pause_s)
    if planned.half_closes:
        with suppress(trio.BrokenResourceError):
            await stream.send_eof()
    with trio.move_on_after(planned.leaves_after_s):
        if not planned.parts_are_whole:
            await trio.sleep(planned.leaves_after_s)
            return LEFT
        received = b""
        while chunk := await stream.receive_some(65536):
            received += chunk
            if (status := _status(received)) is not None:
                return status
        if planned.half_closes:
            return HALF
        return CLOSED if planned.kind in HOSTILE else CUT
    return LEFT


def _status(received: bytes) -> str | None:
    """Return the status of a response that has arrived as a whole, ``None`` until then."""
    head, separator, body = received.partition(b"\r\n\r\n")
    if not separator:
        return None
    if not head.startswith(b"HTTP/1.1 "):
        return CLOSED  # HTTP/2
    _, _, length = head.lower().partition(b"content-length:")
    if length and len(body) < int(length.split(b"\r\n")[0]):
        return None
    return head[9:12].decode()


@define
class Killer:
    """Kills engine processes with SIGKILL, each at a given number of requests."""

    server: Server
    choose: random.Random
    due: list[int]
    """Numbers of requests before which one is killed."""
    kills: int = 0

    def before(self, number: int) -> None:
        """Kill one if it is time and one is alive."""
        if self.due and number >= self.due[0] and (alive := engine_processes(self.server)):
            self.due.pop(0)
            os.kill(self.choose.choice(alive), signal.SIGKILL)
            self.kills += 1


def engine_processes(server: Server) -> list[int]:
    """Return the engine processes that run."""
    found = []
    for pid in process_tree(server.pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            if ENGINE_PROCESS in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


async def tell(server: Server, settings: Settings) -> Story:
    """Put a server through everything. Cancellation: at once."""
    story = Story(warm_requests=settings.warm)
    killer = Killer(server, random.Random(settings.seed), _evenly(settings))
    with open_progress() as progress:
        task = progress.add_task("", total=settings.requests)
        for what, numbers in (("warm", range(settings.warm)), ("all of it", range(settings.warm, settings.requests))):
            progress.update(task, description=what)
            turns = iter(numbers)

            async def client(turns: Iterator[int] = turns) -> None:
                for number in turns:
                    killer.before(number)
                    planned = plan(settings.seed, number)
                    end = await send(server, planned)
                    story.ledger.enter(planned.kind, end)
                    if planned.kind == BAD_INPUT and end.isdigit() and end[0] != "4" and end != "503":
                        story.accepted_bad.append(f"{end}: {planned.parts[-1][-200:]!r}")
                    progress.advance(task)

            async with trio.open_nursery() as nursery:
                for _ in range(settings.clients):
                    nursery.start_soon(client)
            story.busy = await wait_settled(server)
            await trio.sleep(settings.idle_s)
            story.warm_mib = story.warm_mib or memory_mib(server)
        progress.update(task, description="done")
    story.end_mib, story.kills = memory_mib(server), killer.kills
    story.still_answers = await send(server, Plan.post("/v1/embeddings", b'{"input": "a"}')) == "200"
    return story


def _evenly(settings: Settings) -> list[int]:
    between = settings.requests - settings.warm
    return [settings.warm + between * number // (settings.kills + 1) for number in range(1, settings.kills + 1)]


def memory_mib(server: Server) -> float:
    """Return the memory of all processes, shared pages counted once."""
    return sum(process.pss_mib for process in memory_of(server.pid))


async def wait_settled(server: Server) -> dict[str, float]:
    """Wait until all engine processes are ready and the server is idle; return its work left after ``SETTLE_S``.

    Cancellation: at once.
    """
    busy: dict[str, float] = {}
    async with httpx.AsyncClient(trust_env=False, timeout=SETTLE_S) as client:
        with trio.move_on_after(READY_TIMEOUT_S):
            while await total_of(server, "trio_pool_serve_engine", of="ready") < REPLICAS:  # noqa: ASYNC110  (another process)
                await trio.sleep(0.1)
        with trio.move_on_after(SETTLE_S):
            while busy := busy_of((await client.get(f"{server.url}/load")).json()):  # noqa: ASYNC110
                await trio.sleep(0.1)
    return busy


def show(stories: list[Story]) -> None:
    """Print the tables."""
    for story in stories:
        total = story.ledger.total
        ends = sorted(total, key=lambda end: (not end.isdigit(), end))
        rows = [
            [kind, str(counts.total()), *(str(counts[end] or "") for end in ends)]
            for kind, counts in sorted(story.ledger.ends.items())
        ]
        rows.append(["all", str(story.ledger.sent), *(str(total[end]) for end in ends)])
        print_table("How requests ended", ["kind", "sent", *ends], rows)
        rows = [[promise, was, "yes" if kept else "**no**"] for promise, was, kept in story.promises()]
        rows.append(["engine processes killed", str(story.kills), ""])
        rows.append(["memory, MiB, warm and at the end", f"{story.warm_mib:.0f}, {story.end_mib:.0f}", ""])
        print_table("Promises", ["promise", "was", "kept"], rows)
        for bad in sorted(set(story.accepted_bad))[:10]:
            print(bad)


def draw(story: Story, settings: Settings) -> None:
    """Plot how the requests of each kind ended."""
    figure, (axis,) = open_figure(1)
    kinds = sorted(story.ledger.ends)
    left = [0] * len(kinds)
    for end in sorted(story.ledger.total):
        widths = [story.ledger.ends[kind][end] for kind in kinds]
        axis.barh(kinds, widths, left=left, label=end)
        left = [sum(pair) for pair in zip(left, widths, strict=True)]
    axis.set(title="How requests ended, by kind", xlabel="requests")
    axis.legend(frameon=False, fontsize="small")
    write_figure(figure, settings.output_dir, "chaos")


async def run(settings: Settings) -> list[Story]:
    """Measure and report. Cancellation: at once; servers are stopped."""
    report = Report("chaos", settings)
    os.environ[SEED] = str(settings.seed)
    stories: list[Story] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(MODEL_PATH) if settings.model == "minilm" else write_bert(Path(folder), settings.model)
        for _ in range(settings.rounds):
            command = ["benchmarks.chaotic_server", f"{MODEL}={model}", *FLAGS]
            async with open_server("chaos", command, ready_path="/readyz") as server:
                await wait_settled(server)
                stories.append(await tell(server, settings))
    show(stories)
    report.write(stories=[_as_document(story) for story in stories])
    draw(stories[-1], settings)
    return stories


def _as_document(story: Story) -> dict[str, Any]:
    return {
        "ends": {kind: dict(counts) for kind, counts in story.ledger.ends.items()},
        "promises": [{"promise": promise, "was": was, "kept": kept} for promise, was, kept in story.promises()],
        "kills": story.kills,
        "warm_mib": story.warm_mib,
        "end_mib": story.end_mib,
        "accepted_bad": sorted(set(story.accepted_bad)),
    }


def main(settings: Settings = Settings()) -> None:
    """Put a server through ten thousand unkind requests, and account for each."""
    stories = trio.run(run, settings)
    if broken := [promise for story in stories for promise in story.broken()]:
        print("BROKEN: " + "; ".join(broken), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    cyclopts.run(main)
