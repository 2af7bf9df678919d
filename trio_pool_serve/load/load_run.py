"""Sends requests to one server for some time, and counts how each ends. Also quantiles of latencies."""

import gc
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

import trio
from attrs import define, field, frozen

from trio_pool_serve.load.client_connection import (
    NO_CONNECTION,
    NOT_SENT,
    TIMEOUT,
    ClientConnection,
    NoResponseError,
    Response,
    Target,
)

ANSWERED = "200"

MAX_RUNNING_REQUESTS = 10_000
"""Maximum unanswered requests of an open loop: file descriptors are few."""

PAUSE_S = 0.05
"""How long a closed-loop client waits after a failed request: servers refuse in microseconds."""

KEPT_REASON = 300
"""Characters of an error that are kept."""


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest of ``values`` that a ``share`` of them does not exceed; NaN if there are none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan


@frozen(kw_only=True)
class LoadPlan:
    """The requests, which are sent in turns, and their timing.

    With ``clients``, each client sends its next request when it has its response (closed loop). Otherwise ``per_s``
    requests begin per second, whether or not earlier ones have been answered (open loop): evenly, or with ``poisson``
    at random.
    """

    target: Target
    requests: Sequence[bytes]
    clients: int = 0
    per_s: float = 0.0
    poisson: bool = False
    seed: int = 0
    ramp_s: float = 0.0
    """Seconds of load before measuring begins."""
    seconds: float = 10.0
    timeout_s: float = math.inf


@define(eq=False)
class LoadRun:
    """One plan being run.

    Latencies count from the time at which a request was due: a stall of the server shows in every request that was due
    during it. A request counts if it begins before the end and ends after the ramp, however long it takes. For the
    throughput it counts by the share of its duration between the two, so that a few long requests weigh as much as
    many short ones.
    """

    plan: LoadPlan
    on_response: Callable[[Response], object] | None = None
    """Called for each counted response of status 200, whose body is kept for it."""
    on_failure: Callable[[str, str], object] | None = None
    """Called with the outcome and the reason of each request that ends otherwise; its exceptions end the run."""
    begin: float = field(init=False, default=math.inf)
    """When measuring begins, by trio's clock."""
    end: float = field(init=False, default=math.inf)
    outcomes: dict[str, list[float]] = field(init=False, factory=dict)
    """Latencies of requests in seconds, by status or, without a status, by ``TIMEOUT``, ``RESET`` and so on."""
    reasons: dict[str, str] = field(init=False, factory=dict)
    """The first response body or error message of each outcome."""
    finished: float = field(init=False, default=0.0)
    """Requests answered with 200, each by the share of its duration between begin and end."""
    late_s: list[float] = field(init=False, factory=list)
    """How much later than planned requests began, because this process was busy."""
    in_flight: int = field(init=False, default=0)
    unfinished: int = field(init=False, default=0)
    """Requests that were in flight when the run was cancelled."""
    _idle: list[ClientConnection] = field(init=False, factory=list)

    async def run(self) -> None:
        """Send the requests until the end, and wait for all responses.

        Raises the exceptions of ``on_failure``, in a group. Cancellation: at once; requests without a response are not
        counted.
        """
        turns = itertools.cycle(self.plan.requests)
        gc.freeze()
        self.begin = trio.current_time() + self.plan.ramp_s
        self.end = self.begin + self.plan.seconds
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(self.plan.clients):
                    nursery.start_soon(self._client, turns)
                if not self.plan.clients:
                    nursery.start_soon(self._arrive, turns, nursery)
        finally:
            with trio.CancelScope(shield=True):  # closing does not wait
                for connection in self._idle:
                    await connection.aclose()
            self._idle.clear()

    @property
    def latencies(self) -> list[float]:
        """Latencies of the requests answered with 200, in seconds."""
        return self.outcomes.get(ANSWERED, [])

    @property
    def measured_s(self) -> float:
        """Seconds between begin and end, or until now if that is earlier."""
        return max(0.0, min(self.end, trio.current_time()) - self.begin)

    async def _client(self, turns: Iterator[bytes]) -> None:
        while (began := trio.current_time()) < self.end:
            if not await self._send(next(turns), began):
                await trio.sleep(PAUSE_S)

    async def _arrive(self, turns: Iterator[bytes], nursery: trio.Nursery) -> None:
        """Begin requests on a timetable, whether or not earlier ones have ended."""
        random_number = random.Random(self.plan.seed)  # noqa: S311  (for times)
        first = due = trio.current_time()
        for number in itertools.count(1):
            await trio.sleep_until(due)
            if due >= self.end:
                return
            self.late_s.append(trio.current_time() - due)
            if self.in_flight < MAX_RUNNING_REQUESTS:
                nursery.start_soon(self._send, next(turns), due)
            else:
                self._fail(NOT_SENT, "too many requests wait for their responses", due)
            if self.plan.poisson:
                due += random_number.expovariate(self.plan.per_s)
            else:  # not by adding up: the number is exact
                due = first + number / self.plan.per_s

    async def _send(self, request: bytes, due: float) -> bool:
        """Send a request that was due at ``due``; return whether it was answered with 200."""
        self.in_flight += 1
        try:
            with trio.fail_after(self.plan.timeout_s):
                response = await self._ask(request)
        except trio.Cancelled:
            self.unfinished += 1
            raise
        except trio.TooSlowError:
            self._fail(TIMEOUT, f"no whole response within {self.plan.timeout_s:g} s", due)
        except NoResponseError as error:
            self._fail(error.outcome, str(error), due)
        except (OSError, trio.BrokenResourceError) as error:
            self._fail(NO_CONNECTION, str(error.__cause__ or error), due)
        else:
            if response.status == int(ANSWERED):
                self.count(due, trio.current_time(), response)
                return True
            self._fail(str(response.status), response.body[:KEPT_REASON].decode(errors="replace"), due)
        finally:
            self.in_flight -= 1
        return False

    async def _ask(self, request: bytes) -> Response:
        """Send a request over an idle connection, or over a new one.

        If the server has closed the idle connection in the meantime, the request is sent again: it has not failed.
        """
        while True:
            if self._idle:
                connection = self._idle.pop()
            else:
                connection = await ClientConnection.open(self.plan.target, keeps_body=self.on_response is not None)
            try:
                return await connection.ask(request)
            except NoResponseError as error:
                if not error.is_stale:  # as a new connection never is
                    raise
            finally:
                if connection.keeps_alive:
                    self._idle.append(connection)
                else:
                    with trio.CancelScope(shield=True):  # closing does not wait
                        await connection.aclose()

    def count(self, due: float, now: float, response: Response | None = None) -> None:
        """Count a request that was answered with 200."""
        if now >= self.begin:
            self.outcomes.setdefault(ANSWERED, []).append(now - due)
            if response is not None and self.on_response is not None:
                self.on_response(response)
        between = min(now, self.end) - max(due, self.begin)
        if between > 0:
            self.finished += between / (now - due)

    def _fail(self, outcome: str, reason: str, due: float) -> None:
        now = trio.current_time()
        if now >= self.begin:
            self.outcomes.setdefault(outcome, []).append(now - due)
            self.reasons.setdefault(outcome, reason)
        if self.on_failure is not None:
            self.on_failure(outcome, reason)
