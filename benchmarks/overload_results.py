"""What `overload.py` has measured: tables, promises, a plot and a document."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import define, field, frozen

from benchmarks.open_loop import UNANSWERED, OpenLoopResult, counts
from benchmarks.report import open_figure, print_table, write_figure
from trio_pool_serve.load.client_connection import NOT_SENT

KEEP_ALIVE_CLIENTS = 64

REFUSED = ("429", "503")

MAX_QUEUE_S = 5.0
"""The server's default."""


@frozen
class Capacity:
    """Requests/s of closed-loop clients: each over a connection of its own, by number of clients, and kept alive."""

    by_clients: dict[int, float]
    kept_alive: float | None

    @property
    def best_clients(self) -> int:
        """The number of clients, with a connection per request, whose goodput was best."""
        return max(self.by_clients, key=lambda clients: self.by_clients[clients])


@define
class Phase:
    """One load of one server."""

    factor: float
    capacity: float
    """Requests/s of closed-loop clients, just before."""
    load: OpenLoopResult
    health: OpenLoopResult
    before_mib: float
    peak_mib: float
    after_mib: float
    settled: bool
    stolen: float
    """Cores that other virtual machines of the host took meanwhile."""

    @property
    def share(self) -> float:
        """Goodput ÷ capacity."""
        return self.load.goodput / self.capacity

    def ends(self) -> list[str]:
        """Return how the requests ended: one row of a table."""
        load = self.load
        other = sum(counts(load).values()) - load.count("200", *REFUSED, *UNANSWERED, NOT_SENT)
        ends = [load.count("200"), *map(load.count, REFUSED), other, *map(load.count, UNANSWERED)]
        return [f"{load.wanted / load.seconds:.0f}", f"{load.offered / load.seconds:.0f}", *map(str, ends)]

    def quality(self) -> list[str]:
        """Return what the requests got, as a row."""
        load, health = self.load, self.health
        return [
            f"{self.capacity:.0f}",
            f"{self.share:.2f}",
            *(_ms(load.latency_ms(share, "200")) for share in (0.5, 0.99)),
            _ms(load.latency_ms(0.99, *REFUSED)),
            str(load.without_retry_after),
            _ms(health.latency_ms(0.99, "200")),
            str(health.count(*UNANSWERED)),
        ]

    def costs(self) -> list[str]:
        """Return the server's memory and what the generators did, as a row."""
        return [
            f"{self.before_mib:.0f}",
            f"{self.peak_mib:.0f}",
            f"{self.after_mib:.0f}",
            "yes" if self.settled else "**no**",
            _ms(self.load.late_ms),
            str(self.load.count(NOT_SENT)),
            f"{self.load.cpu_s / self.load.seconds:.2f}",
            f"{self.stolen:.2f}",
        ]


def _ms(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.0f}"


ENDS = ("load", "wanted/s", "offered/s", "200", *REFUSED, "other", *UNANSWERED)

QUALITY = (
    *(
        "load",
        "capacity/s",
        "goodput ÷ capacity",
        "p50 ms",
        "p99 ms",
        "refusals p99 ms",
        "refusals without Retry-After",
    ),
    *("/health p99 ms", "/health unanswered"),
)

COSTS = (
    "load",
    "MiB before",
    "peak",
    "after",
    "settled",
    "sent late, p99 ms",
    "not sent",
    "generator cores",
    "cores stolen",
)


@define
class Overload:
    """One kind of requests: the capacity, and the loads."""

    kind: str
    capacity: Capacity
    phases: list[Phase] = field(factory=list)


def show(measured: Sequence[Overload]) -> None:
    """Print the tables."""
    rows = [
        [
            each.kind,
            " · ".join(f"{clients}: {rate:.0f}" for clients, rate in each.capacity.by_clients.items()),
            "refused" if each.capacity.kept_alive is None else f"{each.capacity.kept_alive:.0f}",
        ]
        for each in measured
    ]
    kept = f"{KEEP_ALIVE_CLIENTS} clients, kept alive"
    print_table("Capacity, requests/s", ["requests", "by clients, a connection each", kept], rows)
    phases = [(f"{each.kind}, {phase.factor:g}×", phase) for each in measured for phase in each.phases]
    print_table("How requests ended", ENDS, [[name, *phase.ends()] for name, phase in phases])
    print_table("What they got", QUALITY, [[name, *phase.quality()] for name, phase in phases])
    print_table("Memory, and the load generators", COSTS, [[name, *phase.costs()] for name, phase in phases])
    print_table("Promises", ["promise", "worst", "kept"], promises(measured))


def promises(measured: Sequence[Overload]) -> list[list[str]]:
    """Return what a server should keep at any load, what was worst, and whether it was kept."""
    phases = [phase for each in measured for phase in each.phases]
    loads = [phase.load for phase in phases]
    unanswered = max(load.count(*UNANSWERED) / max(1, load.offered) for load in loads)
    # A load below the capacity cannot be answered at more than it brings.
    above = [phase.share for phase in phases if phase.factor > 1]
    goodput = min(above, default=math.nan)
    slowest = max(load.latency_ms(0.99, "200") for load in loads) / 1000
    errors = max(load.count(*(end for end in counts(load) if end[0] in "45" and end not in REFUSED)) for load in loads)
    bare = max(load.without_retry_after for load in loads)
    health = max(phase.health.count(*UNANSWERED) for phase in phases)
    return [
        ["every request is answered", f"{unanswered:.1%} unanswered", _yes(unanswered == 0)],
        ["goodput stays at 0.9 of the capacity or more", f"{goodput:.2f}", _yes(goodput >= 0.9)],
        [
            f"accepted requests take at most {MAX_QUEUE_S + 1:g} s (p99)",
            f"{slowest:.1f} s",
            _yes(slowest <= MAX_QUEUE_S + 1),
        ],
        ["other requests are refused, with 429 or 503", f"{errors} others", _yes(errors == 0)],
        ["refusals have Retry-After", f"{bare} without", _yes(bare == 0)],
        ["/health is answered", f"{health} unanswered", _yes(health == 0)],
    ]


def _yes(kept: bool) -> str:  # noqa: FBT001  (a word for a value)
    return "yes" if kept else "**no**"


def draw(measured: Sequence[Overload], output_dir: Path) -> None:
    """Plot goodput, latency and how requests ended, by load."""
    figure, (goodput, latency, ends) = open_figure(3)
    for each in measured:
        factors = [phase.factor for phase in each.phases]
        shares = [phase.share for phase in each.phases]
        goodput.plot(factors, shares, marker="o", label=each.kind)
        (drawn,) = latency.plot(factors, [p.load.latency_ms(0.99, "200") for p in each.phases], "o-", label=each.kind)
        refusals = [phase.load.latency_ms(0.99, *REFUSED) for phase in each.phases]
        latency.plot(factors, refusals, "x:", color=drawn.get_color())
        unanswered = [100 * p.load.count(*UNANSWERED) / max(1, p.load.offered) for p in each.phases]
        ends.plot(factors, unanswered, marker="o", label=each.kind)
    goodput.set(title="Goodput ÷ capacity", xlabel="load ÷ capacity", ylim=(0, None))
    latency.set(title="p99, ms: answered (–) and refused (···)", xlabel="load ÷ capacity", yscale="log")
    ends.set(title="Requests without a status, %", xlabel="load ÷ capacity", ylim=(0, 100))
    goodput.legend(frameon=False)
    write_figure(figure, output_dir, "overload")


def as_document(each: Overload) -> dict[str, Any]:
    """Return one kind of requests for JSON: counts and quantiles, not every latency."""
    return {
        "requests": each.kind,
        "capacity": attrs.asdict(each.capacity),
        "phases": [
            {
                "factor": phase.factor,
                "goodput_share": phase.share,
                "outcomes": counts(phase.load),
                "health": counts(phase.health),
                **dict(zip(QUALITY[1:], phase.quality(), strict=True)),
                **dict(zip(COSTS[1:], phase.costs(), strict=True)),
            }
            for phase in each.phases
        ],
    }
