"""Overload at 0.106 ms of CPU time per request: ``trio_pool_serve.load`` takes 0.34 ms, and sends 0.4 s late.

Measured at 1,533 requests/s, five times the capacity of all-MiniLM-L6-v2 on two cores of an Intel Xeon, medians of
three rounds: with a new connection per request, this loop over epoll sends within 8 ms of the timetable (p99). At
ten times the capacity, tasks would take one of the two cores that the server needs.

Requests arrive on a timetable, each over a connection of its own, whether or not earlier ones have been answered. Each
ends with a status, or with the reason for there being none.
"""

import errno
import gc
import heapq
import itertools
import math
import os
import random
import re
import resource
import select
import socket
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator

from attrs import Factory, define, field, frozen

from benchmarks.job_process import do_job, run_job, run_jobs
from trio_pool_serve.load.client_connection import CUT, NO_CONNECTION, NOT_SENT, RESET, TIMEOUT, request_bytes
from trio_pool_serve.load.load_run import quantile

MODULE = "benchmarks.open_loop"

CHUNK = 64 * 1024

SPARE_FILES = 64
"""File descriptors that a generator leaves to other things than requests."""

PAUSE_S = 0.05
"""How long a closed-loop client waits after a refusal before its next request."""

CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)

RETRY_AFTER = re.compile(rb"\r\nretry-after: *\d", re.IGNORECASE)

UNANSWERED = (TIMEOUT, RESET, CUT, NO_CONNECTION)


@frozen(kw_only=True)
class OpenLoopJob:
    """Requests and when they are sent: ``per_s`` a second (open loop), or by closed-loop ``clients``.

    With ``poisson`` the times between arrivals are random, by ``seed``, and not all the same. Connections come from the
    addresses ``sources`` in turns, all of which are this machine's.
    """

    port: int
    path: str = "/v1/embeddings"
    bodies: list[str] = Factory(list)
    headers: dict[str, str] = Factory(dict)
    per_s: float = 0.0
    clients: int = 0
    seconds: float = 10.0
    timeout_s: float = 20.0
    poisson: bool = False
    seed: int = 0
    sources: list[str] = Factory(lambda: ["127.0.0.1"])
    niceness: int = 0


@define(kw_only=True)
class OpenLoopResult:
    """How the requests ended: ``outcomes`` has statuses, and the names above, with the seconds that each one took.

    They count from when the request was sent. How much later that was than its turn is in ``late_s``: a generator that
    has no time is not taken for a server that is slow.
    """

    seconds: float
    wanted: int
    outcomes: dict[str, list[float]] = field(factory=dict)
    answered_in_time: int = 0
    """Requests answered with 200 before the last arrival: the goodput, without answers after the load."""
    without_retry_after: int = 0
    """Responses with status 429 or 503 that do not have the header."""
    late_s: list[float] = field(factory=list)
    cpu_s: float = 0.0

    def count(self, *names: str) -> int:
        """Return how many requests ended so."""
        return sum(len(self.outcomes.get(name, ())) for name in names)

    @property
    def offered(self) -> int:
        """Requests that were begun."""
        return sum(map(len, self.outcomes.values())) - self.count(NOT_SENT)

    @property
    def goodput(self) -> float:
        """Requests answered with 200 per second of load."""
        return self.answered_in_time / self.seconds

    def latency_ms(self, share: float, *names: str) -> float:
        """Return the latency that ``share`` of the requests that ended so stayed within; NaN without any."""
        return 1e3 * quantile(list(itertools.chain.from_iterable(self.outcomes.get(name, ()) for name in names)), share)

    @property
    def late_ms(self) -> float:
        """How late requests were sent, p99."""
        return 1e3 * quantile(self.late_s, 0.99)


def merged(results: Iterable[OpenLoopResult]) -> OpenLoopResult:
    """Return the results of several generators that ran at the same time as one."""
    total: OpenLoopResult | None = None
    for result in results:
        if total is None:
            total = result
            continue
        total.wanted += result.wanted
        total.answered_in_time += result.answered_in_time
        total.without_retry_after += result.without_retry_after
        total.late_s += result.late_s
        total.cpu_s += result.cpu_s
        for name, latencies in result.outcomes.items():
            total.outcomes.setdefault(name, []).extend(latencies)
    if total is None:
        raise ValueError("no results")
    return total


@define(eq=False)
class Exchange:
    """One request on its connection."""

    connection: socket.socket
    left: memoryview
    """The bytes that are still to be sent."""
    began: float
    accepted: bool = False
    received: bytes = b""
    missing: int | None = None
    """Bytes of the response that are still to come; ``None`` until its head has arrived."""
    status: str = ""


@define(eq=False)
class Generator:
    """A job being run, in one thread without tasks."""

    job: OpenLoopJob
    result: OpenLoopResult = field(init=False)
    _turns: list[float] = field(init=False, factory=list)
    """When the next requests are due: a heap."""
    _running: dict[int, Exchange] = field(init=False, factory=dict)
    _by_age: deque[Exchange] = field(init=False, factory=deque)
    _epoll: select.epoll = field(init=False, factory=select.epoll)
    _end: float = field(init=False, default=0.0)
    _most: int = field(init=False, default=0)
    _arrivals: int = field(init=False, default=0)

    def run(self) -> OpenLoopResult:
        """Send the requests, and wait until each has ended."""
        job = self.job
        os.nice(job.niceness)
        self._most = _raise_file_limit() - SPARE_FILES
        random_number = random.Random(job.seed)
        requests = [_without_keep_alive(job, body) for body in job.bodies or [""]]
        random_number.shuffle(requests)
        bodies, sources = itertools.cycle(requests), itertools.cycle(job.sources)
        gc.freeze()
        gc.disable()  # nothing here is cyclic
        begin = time.perf_counter()
        self._end = begin + job.seconds
        spent = time.process_time()
        self._turns = [begin] * (job.clients or 1)
        self.result = OpenLoopResult(seconds=job.seconds, wanted=round(job.per_s * job.seconds))
        while self._turns or self._running:
            self._begin_due(bodies, sources, random_number)
            self._handle_events()
            self._drop_old()
        self.result.cpu_s = time.process_time() - spent
        return self.result

    def _begin_due(self, bodies: Iterator[memoryview], sources: Iterator[str], random_number: random.Random) -> None:
        job = self.job
        while self._turns and self._turns[0] <= time.perf_counter():
            due = heapq.heappop(self._turns)
            if due >= self._end:
                continue
            self._arrivals += 1
            if job.poisson:
                heapq.heappush(self._turns, due + random_number.expovariate(job.per_s))
            elif self._arrivals < self.result.wanted:  # not by adding up: the number is exact
                heapq.heappush(self._turns, self._end - job.seconds + self._arrivals / job.per_s)
            self.result.late_s.append(time.perf_counter() - due)
            self._begin(next(bodies), next(sources))

    def _begin(self, request: memoryview, source: str) -> None:
        now = time.perf_counter()
        if len(self._running) >= self._most:
            self._count(NOT_SENT, now, now)
            return
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        connection.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        exchange = Exchange(connection, request, now)
        try:
            connection.bind((source, 0))
            refused = connection.connect_ex(("127.0.0.1", self.job.port))
        except OSError:
            refused = errno.EADDRNOTAVAIL
        if refused not in (0, errno.EINPROGRESS):
            self._count(NOT_SENT if refused == errno.EADDRNOTAVAIL else NO_CONNECTION, now, now)
            connection.close()
            return
        self._running[connection.fileno()] = exchange
        self._by_age.append(exchange)
        self._epoll.register(connection.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _handle_events(self) -> None:
        now = time.perf_counter()
        until = min(self._turns[0] if self._turns else math.inf, now + 0.05)
        for number, events in self._epoll.poll(max(0.0, until - now)):
            exchange = self._running[number]
            try:
                if events & select.EPOLLOUT and exchange.left:
                    self._send(exchange)
                if events & ~select.EPOLLOUT:
                    self._receive(exchange)
            except BlockingIOError:
                continue
            except OSError:
                self._finish(exchange, RESET if exchange.accepted else NO_CONNECTION)

    def _send(self, exchange: Exchange) -> None:
        try:
            sent = exchange.connection.send(exchange.left)
        except (BrokenPipeError, ConnectionResetError):
            if not exchange.accepted:
                raise
            sent = len(exchange.left)  # it was answered before its end: what has arrived is still to be read
        exchange.accepted = True
        exchange.left = exchange.left[sent:]
        if not exchange.left:
            self._epoll.modify(exchange.connection.fileno(), select.EPOLLIN)

    def _receive(self, exchange: Exchange) -> None:
        arrived = exchange.connection.recv(CHUNK)
        if not arrived:
            self._finish(exchange, CUT)
            return
        if exchange.missing is None:
            exchange.received += arrived
            end = exchange.received.find(b"\r\n\r\n")
            if end < 0:
                return
            head = exchange.received[:end]
            exchange.status = head[9:12].decode()
            if exchange.status in ("429", "503") and not RETRY_AFTER.search(head):
                self.result.without_retry_after += 1
            length = CONTENT_LENGTH.search(head)
            exchange.missing = end + 4 + int(length[1] if length else 0) - len(exchange.received)
        else:
            exchange.missing -= len(arrived)
        if exchange.missing <= 0:
            self._finish(exchange, exchange.status)

    def _drop_old(self) -> None:
        limit = time.perf_counter() - self.job.timeout_s
        while self._by_age and (self._by_age[0].connection.fileno() < 0 or self._by_age[0].began < limit):
            exchange = self._by_age.popleft()
            if exchange.connection.fileno() >= 0:
                self._finish(exchange, TIMEOUT if exchange.accepted else NO_CONNECTION)

    def _finish(self, exchange: Exchange, outcome: str) -> None:
        del self._running[exchange.connection.fileno()]
        exchange.connection.close()
        now = time.perf_counter()
        self._count(outcome, exchange.began, now)
        if self.job.clients:
            heapq.heappush(self._turns, now if outcome == "200" else now + PAUSE_S)

    def _count(self, outcome: str, began: float, now: float) -> None:
        self.result.outcomes.setdefault(outcome, []).append(round(now - began, 6))
        if outcome == "200" and now <= self._end:
            self.result.answered_in_time += 1


_BIND_ADDRESS_NO_PORT = 24
"""``IP_BIND_ADDRESS_NO_PORT`` of Linux: the port is chosen by ``connect``, so that one can be in use by several."""


def _without_keep_alive(job: OpenLoopJob, body: str) -> memoryview:
    head, separator, content = request_bytes(job.path, body.encode()).partition(b"\r\n\r\n")
    more = "".join(f"\r\n{name}: {value}" for name, value in job.headers.items())
    # The server closes: the ports of connections that clients close stay in use for a minute.
    return memoryview(head + more.encode() + b"\r\nConnection: close" + separator + content)


def _raise_file_limit() -> int:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


async def run_open_loop(job: OpenLoopJob) -> OpenLoopResult:
    """Run a job in a new process. Cancellation: the process is terminated."""
    return await run_job(MODULE, job, OpenLoopResult)


async def run_open_loops(*jobs: OpenLoopJob) -> list[OpenLoopResult]:
    """Run jobs side by side, each in its own process; return their results in order."""
    return await run_jobs(MODULE, jobs, OpenLoopResult)


def counts(result: OpenLoopResult) -> Counter[str]:
    """Return how many requests ended in each way."""
    return Counter({name: len(latencies) for name, latencies in result.outcomes.items()})


if __name__ == "__main__":
    do_job(OpenLoopJob, lambda job: Generator(job).run())
