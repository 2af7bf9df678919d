"""The cost of one request in each thread of a server, by stage, computed from samples of the threads."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from statistics import median

from attrs import Factory, define, frozen

from benchmarks.load import LoadResult
from benchmarks.stack_samples import FORWARD, ORDER, OTHER, Stack
from benchmarks.thread_clocks import ZERO, Clock, Thread

Part = tuple[str, str]
"""The roles of a process and a thread: threads of the same roles are summed."""

TOP_FUNCTIONS = 25

LEAST_US = 1.0
"""Threads that spend less on a request are left out."""


@define
class Observed:
    """All passes at one number of clients, by kind. Each has its own requests, which its numbers are divided by."""

    loads: dict[str, list[LoadResult]] = Factory(lambda: defaultdict(list))
    clocks: dict[str, dict[Thread, Clock]] = Factory(lambda: defaultdict(lambda: defaultdict(lambda: ZERO)))
    lock_wait_s: dict[Thread, float] = Factory(lambda: defaultdict(float))
    running: Counter[Stack] = Factory(Counter)
    locking: Counter[Stack] = Factory(Counter)

    def add(self, kind: str, load: LoadResult, clocks: dict[Thread, Clock]) -> None:
        """Add a pass."""
        self.loads[kind].append(load)
        for thread, clock in clocks.items():
            self.clocks[kind][thread] += clock

    def requests(self, kind: str) -> int:
        """Return how many requests the passes of a kind have seen."""
        return sum(result.requests for result in self.loads[kind])

    def requests_per_s(self, kind: str) -> float:
        """Return the median over the rounds."""
        return median(result.requests_per_s for result in self.loads[kind])


@frozen
class Cast:
    """Which part each thread plays."""

    parts: dict[Thread, Part]
    owners: dict[int, int]

    @classmethod
    def of(cls, observed: Iterable[Observed], names: dict[Thread, str]) -> "Cast":
        """Derive the parts from the stages that the threads were sampled in, and from their names."""
        owners = {thread: owner for owner, thread in names}
        doing: dict[int, Counter[str]] = defaultdict(Counter)
        called: dict[int, str] = {}
        for here in observed:
            for stack, count in (here.running + here.locking).items():
                called[stack.thread_id] = stack.thread_name
                doing[owners.get(stack.thread_id, 0)][stack.stage] += count
        processes = {owner: _process_part(doing[owner]) for owner, _ in names}
        parts = {
            (owner, thread): (processes[owner], _thread_part(called.get(thread), name, main=owner == thread))
            for (owner, thread), name in names.items()
        }
        return cls(parts, owners)

    def of_thread(self, thread: Thread) -> Part:
        """Return a thread's part."""
        return self.parts.get(thread, ("ended", "threads"))

    def of_stack(self, stack: Stack) -> Part:
        """Return the part of the thread that a stack is of."""
        return self.of_thread((self.owners.get(stack.thread_id, 0), stack.thread_id))


def _process_part(doing: Counter[str]) -> str:
    serves = doing["HTTP"] + doing["Quart"] > 0.01 * doing.total()
    computes = doing[FORWARD] > 0.01 * doing.total()
    if serves and computes:
        return "server"
    if serves:
        return "API"
    if computes:
        return "engine"
    return "renderers" if doing["tokenising"] else "others"


def _thread_part(called: str | None, name: str, *, main: bool) -> str:
    """Return a thread's part. Python calls it ``called``, None if it was never seen in Python; Linux ``name``."""
    if main:
        return "loop"
    if (called or name).startswith("Trio thread") or " from trio" in name:
        return "workers"
    if called == "launch":
        return "forward pass"
    return called or "native threads"


@frozen(kw_only=True)
class ThreadProfile:
    """What one request costs in the threads that play one part, µs."""

    process: str
    thread: str
    cpu_us: float
    core_wait_us: float
    lock_wait_us: float
    lock_held_us: float
    samples: int
    stages_us: dict[str, float]
    functions: list[str]
    """Where most samples were taken: innermost functions, and their stages."""

    @property
    def name(self) -> str:
        """What they are called in tables."""
        return f"{self.process}: {self.thread}"


@frozen(kw_only=True)
class RequestProfile:
    """What one request costs at a number of clients."""

    clients: int
    requests: int
    requests_per_s: dict[str, float]
    threads: list[ThreadProfile]

    @property
    def other_share(self) -> float:
        """The share of the time whose stage is not known."""
        total = sum(thread.cpu_us for thread in self.threads)
        return sum(thread.stages_us.get(OTHER, 0.0) for thread in self.threads) / total


def make_profile(clients: int, observed: Observed, cast: Cast) -> RequestProfile:
    """Divide everything by the requests that it was spent on."""
    kinds = ("alone", "sampled", "lock sampled")
    alone, sampled, lock_sampled = (_clocks_by_part(observed.clocks[kind], cast) for kind in kinds)
    running, locking = (_stacks_by_part(stacks, cast) for stacks in (observed.running, observed.locking))
    lock_wait_s: dict[Part, float] = defaultdict(float)
    for thread, seconds in observed.lock_wait_s.items():
        lock_wait_s[cast.of_thread(thread)] += seconds
    requests = observed.requests("alone")
    threads = []
    for part, clock in alone.items():
        cpu_us = 1e6 * clock.cpu_s / requests
        if cpu_us < LEAST_US:
            continue
        shares = _shares(running[part], sampled[part])
        held = _held_shares(running[part], locking[part], sampled[part].ready_s / lock_sampled[part].ready_s)
        threads.append(
            ThreadProfile(
                process=part[0],
                thread=part[1],
                cpu_us=cpu_us,
                core_wait_us=1e6 * clock.core_wait_s / requests,
                lock_wait_us=1e6 * lock_wait_s[part] / observed.requests("lock watched"),
                lock_held_us=cpu_us * sum(share * held[stage] for stage, share in shares.items()),
                samples=running[part].total(),
                stages_us={stage: cpu_us * share for stage, share in _split(shares, held).items()},
                functions=_top_functions(running[part]),
            )
        )
    threads.sort(key=lambda thread: (thread.process, -thread.cpu_us))
    rates = {kind: observed.requests_per_s(kind) for kind in observed.loads}
    return RequestProfile(clients=clients, requests=requests, requests_per_s=rates, threads=threads)


def _clocks_by_part(clocks: dict[Thread, Clock], cast: Cast) -> dict[Part, Clock]:
    parts: dict[Part, Clock] = defaultdict(lambda: ZERO)
    for thread, clock in clocks.items():
        parts[cast.of_thread(thread)] += clock
    return parts


def _stacks_by_part(stacks: Counter[Stack], cast: Cast) -> dict[Part, Counter[Stack]]:
    parts: dict[Part, Counter[Stack]] = defaultdict(Counter)
    for stack, count in stacks.items():
        parts[cast.of_stack(stack)][stack] += count
    return parts


def _by_stage(stacks: Counter[Stack]) -> Counter[str]:
    stages: Counter[str] = Counter()
    for stack, count in stacks.items():
        stages[stack.stage] += count
    return stages


def _top_functions(stacks: Counter[Stack]) -> list[str]:
    seen: Counter[str] = Counter()
    for stack, count in stacks.items():
        seen[f"{stack.innermost}: {stack.stage}"] += count
    return [f"{count} × {where}" for where, count in seen.most_common(TOP_FUNCTIONS)]


def _shares(stacks: Counter[Stack], clock: Clock) -> dict[str, float]:
    """Divide a part's CPU time among the stages; ``clock`` is of the pass that the stacks are of.

    A sample is a moment at which a thread ran or waited for a core. How long it did either is known, and most
    waiting for a core is done by threads that have just been woken, which are still where they slept. So that
    time is taken from the samples there, as far as it goes; the others' are taken for running.
    """
    if not stacks:
        return {"kernels": 1.0}  # no Python ever: threads of OpenMP
    at_waits = Counter({stack: count for stack, count in stacks.items() if stack.at_wait})
    elsewhere = stacks - at_waits
    s_per_sample = clock.ready_s / stacks.total()
    cpu_at_waits_s = max(0.0, s_per_sample * at_waits.total() - clock.core_wait_s)
    share_at_waits = cpu_at_waits_s / clock.cpu_s if elsewhere else 1.0
    shares: dict[str, float] = defaultdict(float)
    for samples, share in ((elsewhere, 1 - share_at_waits), (at_waits, share_at_waits)):
        for stage, count in _by_stage(samples).items():
            shares[stage] += share * count / samples.total()
    return shares


def _held_shares(running: Counter[Stack], locking: Counter[Stack], ready_ratio: float) -> dict[str, float]:
    """Return in which share of each stage's time the interpreter lock is held.

    The stacks are of two passes; ``ready_ratio`` is the time that the threads were ready in the first, over that
    in the second.
    """
    ran, held = _by_stage(running), _by_stage(locking)
    return defaultdict(float, {stage: min(1.0, ready_ratio * held[stage] / ran[stage]) for stage in ran})


def _split(shares: dict[str, float], held: dict[str, float]) -> dict[str, float]:
    """Split the forward pass into dispatch, for which Python holds the interpreter lock, and kernels."""
    split = dict(shares)
    if FORWARD in split:
        total = split.pop(FORWARD)
        split["dispatch"] = total * held[FORWARD]
        split["kernels"] = total - split["dispatch"]
    return {stage: split[stage] for stage in ORDER if stage in split}
