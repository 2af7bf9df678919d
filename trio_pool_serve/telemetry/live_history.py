"""Samples of the whole server, one a second while there are viewers, and the last fifteen minutes of them."""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice

import trio
from attrs import define, field

from trio_pool_serve.telemetry.live_samples import Totals, sample_between
from trio_pool_serve.telemetry.snapshots import Snapshot

EVERY_S = 1.0

KEPT = 900
"""Samples: fifteen minutes."""

AT_ONCE = 32
"""Samples for which memory is taken while they are sent to a viewer, who may read slowly."""

STALE_S = 3 * EVERY_S
"""Snapshots that are further apart are not compared: rates would be means over a time that was not watched."""


@define(eq=False)
class LiveHistory:
    """Takes samples while viewers wait for them; without a viewer nothing runs.

    There is no task for it: of the viewers that wait for the next sample one takes it, in its own task, and all get
    that one. If the viewer that takes it leaves, another does. Samples are kept as JSON, so that each is encoded once
    for all viewers.

    ``take`` returns the snapshots of all processes, ``state`` the server's.
    """

    take: Callable[[], Awaitable[Sequence[Snapshot]]]
    state: Callable[[], str]
    samples: deque[bytes] = field(init=False, factory=lambda: deque(maxlen=KEPT))
    viewers: int = field(init=False, default=0)
    """Counted by those who view."""
    taken: int = field(init=False, default=0)
    """Number of the last sample; the first is 1."""
    _due: float = field(init=False, default=0.0)
    _before: Totals | None = field(init=False, default=None)
    _turn: trio.Lock = field(init=False, factory=trio.Lock)

    async def samples_after(self, number: int) -> tuple[int, list[bytes]]:
        """Return the samples that are kept with numbers above ``number``, or wait for the next if there are none yet.

        At most ``AT_ONCE`` are returned, the oldest, after the number of the last of them. A number that has not been
        reached is of another server, before a restart: then all are. Cancellation: at once; another viewer takes the
        sample.
        """
        if number > self.taken:
            number = 0
        if number == self.taken:
            await self._wait_for_sample(number)
        behind = min(self.taken - number, len(self.samples))
        begin = len(self.samples) - behind
        found = list(islice(self.samples, begin, begin + AT_ONCE))
        return self.taken - behind + len(found), found

    async def _wait_for_sample(self, number: int) -> None:
        async with self._turn:
            if self.taken > number:
                return  # another viewer has taken it
            await trio.sleep_until(self._due)
            totals = Totals.of(await self.take(), now := trio.current_time())
            before = self._before if self._before is not None and now - self._before.monotonic_s < STALE_S else None
            self.samples.append(sample_between(before, totals, number=self.taken + 1, state=self.state()))
            self.taken += 1
            self._before, self._due = totals, now + EVERY_S
