"""Budgets of HTTP/2 frames that bring nothing: pings, settings, empty data, and requests that are cancelled at once."""

import trio
from attrs import define, field

PER_S = 33.0
"""Frames per second, as nghttp2 allows for resets, with ``BURST``."""

BURST = 1000.0

UNCOUNTED = 32.0
"""Frames that a connection may waste whatever others of its address have wasted: enough for any client's beginning."""

PER_REQUEST = 10.0
"""Frames that a completed request makes up for: Envoy's limit of window updates per frame of data."""

BYTES_PER_FRAME = 1024
"""Bytes sent to the client that make up for a frame: it must open its window again for each of ours, of 16 KiB."""


@define(eq=False)
class FrameBudget:
    """Frames that may bring nothing: ``burst`` at a time and ``per_s`` each second, of a connection or an address."""

    burst: float = BURST
    per_s: float = PER_S
    wasted: float = field(default=0.0, init=False)
    _since: float = field(init=False, factory=trio.current_time)

    @property
    def is_exceeded(self) -> bool:
        """Return whether too much has been wasted."""
        self.earn((trio.current_time() - self._since) * self.per_s)
        self._since = trio.current_time()
        return self.wasted > self.burst

    def spend(self, frames: float) -> None:
        """Count frames that bring nothing; more than twice the budget is not remembered."""
        self.wasted = min(self.wasted + frames, 2 * self.burst)

    def earn(self, frames: float) -> None:
        """Make up for wasted frames."""
        self.wasted = max(0.0, self.wasted - frames)
