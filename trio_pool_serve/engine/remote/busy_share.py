"""How busy an engine is, by the metrics of its process."""

from collections import deque

from attrs import define, field

from trio_pool_serve.telemetry.metrics import BUSY
from trio_pool_serve.telemetry.snapshots import Snapshot

WINDOW_S = 10.0
"""Over which the share is taken: long beside a batch, which counts when it is done."""


def busy_seconds(snapshot: Snapshot) -> float:
    """Return the seconds in which an engine process had a batch in flight."""
    families = [family for family in snapshot.families if family.name == BUSY]
    return sum(value for family in families for name, _, value in family.samples if name == f"{BUSY}_total")


@define(eq=False)
class BusyShare:
    """The share of the last ``WINDOW_S`` in which an engine process had a batch in flight."""

    _counted: deque[tuple[float, float]] = field(init=False, factory=deque)
    """Times, and the seconds with batches in flight until then."""

    def observe(self, at: float, busy_s: float) -> None:
        """Record how many seconds had batches in flight until a time, both by the clocks of its machine.

        What was observed before, or is older, changes nothing.
        """
        if self._counted and at <= self._counted[-1][0]:
            return
        self._counted.append((at, busy_s))
        while len(self._counted) > 1 and self._counted[1][0] <= at - WINDOW_S:
            self._counted.popleft()

    @property
    def share(self) -> float:
        """From 0 to 1, which is also returned until it is known: no engine is idle for not having been observed."""
        if not self._counted:
            return 1.0
        (begin, busy_then), (end, busy_now) = self._counted[0], self._counted[-1]
        return min(1.0, (busy_now - busy_then) / (end - begin)) if end - begin >= WINDOW_S else 1.0
