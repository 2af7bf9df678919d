"""Admission: a request is admitted whole or refused whole, by its estimated tokens."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attrs import define, field

from trio_pool_serve.errors import OverloadedError

MAX_RETRY_AFTER_S = 30.0

RATE_WEIGHT = 0.2
"""Weight of the newest batch in the exponential moving averages of tokens and seconds; their ratio is the rate."""


@define(eq=False)
class DrainRate:
    """The rate at which a device computes tokens, as a moving average over batches."""

    _tokens: float = field(default=0.0, init=False)
    _seconds: float = field(default=0.0, init=False)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second; 0 before the first batch."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Record a batch of ``tokens`` tokens that occupied the device for ``seconds``."""
        weight = RATE_WEIGHT if self._seconds else 1.0
        self._tokens += (tokens - self._tokens) * weight
        self._seconds += (max(seconds, 1e-6) - self._seconds) * weight


@define(eq=False)
class Admission:
    """Counts the tokens of admitted requests; ``tokens_per_s()`` is the rate at which they drain, 0 if unknown.

    A request is always admitted when no other is, however long it is.
    """

    max_tokens: int
    tokens_per_s: Callable[[], float]
    admitted_tokens: int = field(default=0, init=False)

    @contextmanager
    def admit(self, tokens: int) -> Iterator[None]:
        """Count ``tokens`` as admitted until the context ends; raises ``OverloadedError`` if they do not fit."""
        if self.admitted_tokens and self.admitted_tokens + tokens > self.max_tokens:
            raise OverloadedError(
                f"The queue is full: {self.admitted_tokens} tokens are admitted of at most {self.max_tokens}, "
                f"and this request has about {tokens}.",
                retry_after_s=self.retry_after_s(tokens),
            )
        self.admitted_tokens += tokens
        try:
            yield
        finally:
            self.admitted_tokens -= tokens

    def retry_after_s(self, tokens: int) -> float:
        """Return the whole seconds until ``tokens`` more would fit, at the measured rate; at least 1."""
        excess = self.admitted_tokens + tokens - self.max_tokens
        rate = self.tokens_per_s()
        if not rate:
            return 1.0
        return float(min(MAX_RETRY_AFTER_S, max(1, math.ceil(excess / rate))))
