"""The access log: an event for each request, up to a rate."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import trio
from attrs import define, field

logger = logging.getLogger(__name__)

PERIOD_S = 1.0

MAX_PER_PERIOD = 100
"""Events of each kind. A line takes 50 µs of the event loop and 300 bytes: more would slow the server down."""


@define(eq=False)
class AccessLog:
    """Logs an event for each request, or with ``only_failures`` for those that failed in the server.

    At most ``MAX_PER_PERIOD`` events are logged in a second, and as many failures besides, so that these are seen among
    any number of others. The rest are counted by status, and their numbers logged once a second by ``run``.
    """

    only_failures: bool = False
    clock: Callable[[], float] = trio.current_time
    left_out: Counter[str] = field(init=False, factory=Counter)
    """By status, since they were last logged."""
    _since: float = field(init=False, default=-PERIOD_S)
    _logged: dict[bool, int] = field(init=False, factory=dict)
    """In this period: failures, and others."""
    _leaves_out: trio.Event = field(init=False, factory=trio.Event)

    def wants(self, *, failed: bool) -> bool:
        """Whether an event would be logged at all, so that it is worth making."""
        return failed or not self.only_failures

    def add(self, event: Mapping[str, Any], *, failed: bool) -> None:
        """Log an event, or count it by its ``status`` or, where it has none, its ``outcome``."""
        now = self.clock()
        if now >= self._since + PERIOD_S:
            self._since, self._logged = now, {True: 0, False: 0}
        if self._logged[failed] < MAX_PER_PERIOD:
            self._logged[failed] += 1
            logger.log(logging.WARNING if failed else logging.INFO, "request", extra=dict(event))
            return
        self.left_out[str(event["status"] or event["outcome"])] += 1
        self._leaves_out.set()

    async def run(self) -> NoReturn:
        """Log, once a second at most, how many events were left out. Cancellation: at once, once they are logged."""
        try:
            while True:
                await self._leaves_out.wait()
                await trio.sleep(PERIOD_S)
                self._log_left_out()
        finally:
            self._log_left_out()

    def _log_left_out(self) -> None:
        if self.left_out:
            logger.info("requests left out of the access log", extra={"left_out": dict(self.left_out)})
        self.left_out.clear()
        self._leaves_out = trio.Event()
