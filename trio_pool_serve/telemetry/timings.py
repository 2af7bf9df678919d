"""Durations of the stages of one request."""

import time
from collections.abc import Callable, Sequence

from attrs import Factory, define, field

from trio_pool_serve.types import PoolingOutput

DURATIONS = ", ".join([f"{stage};dur=%.3f" for stage in ("render", "queue", "forward", "copy", "encode", "total")])
"""The header ``Server-Timing`` without its milliseconds."""


@define(eq=False)
class RequestTimings:
    """Seconds per stage of one request, for ``Server-Timing``.

    The stages of a request with several inputs overlap: ``render`` lasts from the start of the first prompt to the end
    of the last; ``queue``, ``forward`` and ``copy`` are the longest time of any row.
    """

    waited_s: float = 0.0
    """Seconds from the request's arrival until the server read it, if known, and until a thread had decoded it."""
    started: float = field(
        init=False, default=Factory(lambda self: time.perf_counter() - self.waited_s, takes_self=True)
    )
    """When it arrived."""
    rows: int = 0
    tokens: int = 0
    """Tokens of the rendered rows."""
    on_tokens: Callable[[int], object] | None = None
    """Called with the number of tokens of rendered rows, before they are computed."""
    load_s: float = 0.0
    """Time spent waiting for the model to be loaded."""
    render_s: float = 0.0
    queue_s: float = 0.0
    forward_s: float = 0.0
    copy_s: float = 0.0
    encode_s: float = 0.0
    looked_up: int = 0
    """Rows that were looked up in the cache of results."""
    cached: int = 0
    """Rows that were found there."""

    @property
    def total_s(self) -> float:
        """Seconds since the request arrived."""
        return time.perf_counter() - self.started

    def add_rendered(self, *, rows: int, tokens: int) -> None:
        """Count rows that will be computed."""
        self.rows += rows
        self.tokens += tokens
        if self.on_tokens is not None:
            self.on_tokens(tokens)

    def add_rows(self, outputs: Sequence[PoolingOutput]) -> None:
        """Add the durations of computed rows."""
        for output in outputs:
            self.queue_s = max(self.queue_s, output.queue_s)
            self.forward_s = max(self.forward_s, output.forward_s)
            self.copy_s = max(self.copy_s, output.copy_s)

    def stages(self) -> dict[str, float]:
        """Return the seconds of each stage by its name."""
        return {
            "render": self.render_s,
            "queue": self.queue_s,
            "forward": self.forward_s,
            "copy": self.copy_s,
            "encode": self.encode_s,
        }

    def server_timing(self) -> str:
        """Return the value of the ``Server-Timing`` header, in milliseconds as specified.

        If rows were looked up in the cache of results, ``cache`` shows how many were found.
        """
        seconds = self.render_s, self.queue_s, self.forward_s, self.copy_s, self.encode_s, self.total_s
        durations = DURATIONS % tuple([each * 1e3 for each in seconds])
        return f'{durations}, cache;desc="{self.cached}/{self.looked_up}"' if self.looked_up else durations
