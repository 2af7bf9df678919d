"""The limits of a batch: its token budget, its padding, and its tokens if it is bulk."""

import math
from functools import lru_cache

from attrs import define, field, frozen

MAX_PADDING_SHARE = 0.1
"""Share of a batch's padded tokens that may be padding."""

FREE_PADDING_DIVISOR = 64
"""A batch's token budget divided by this may always be padding: on CPU one more batch costs about as much."""

BULK_BATCH_S = 0.02
"""Target duration of a batch of bulk while small requests arrive, which wait behind it."""

FEW_TOKENS, MOST_SLOWER = 256, 1.5
"""Batches of bulk are not made smaller if they have ``FEW_TOKENS`` at most, and a token of them takes more than
``MOST_SLOWER`` times as long as one of a larger batch: most of their time is then constant. With large models it is the
time in which the weights are read."""

BUDGET_STEP = 1.25
"""Factor by which ``BulkBudget`` grows and shrinks, and ``TokenBudget`` grows."""

GROW_AFTER = 8
"""Full batches that must succeed before ``TokenBudget`` grows."""


@define
class BatchBudget:
    """The token budget of a batch that is being formed, and what its rows have used of it."""

    max_tokens: int
    """Includes padding if padding is computed."""
    free_padding: int
    pads: bool = True
    """Whether padding is computed."""
    rows: int = field(default=0, init=False)
    tokens: int = field(default=0, init=False)
    """Without padding."""
    longest: int = field(default=0, init=False)

    @property
    def is_full(self) -> bool:
        """Whether not even the shortest row fits."""
        return (self.longest * (self.rows + 1) if self.pads else self.tokens + 1) > self.max_tokens

    def try_add(self, tokens: int) -> bool:
        """Add a row if it fits, and return whether it did; the first row always fits."""
        longest = tokens if tokens > self.longest else self.longest
        total = self.tokens + tokens
        computed = longest * (self.rows + 1) if self.pads else total
        if self.rows:
            padding = computed - total
            if computed > self.max_tokens or (padding > self.free_padding and padding > MAX_PADDING_SHARE * computed):
                return False
        self.rows += 1
        self.tokens = total
        self.longest = longest
        return True


@frozen
class BatchLimits:
    """What a batch of a device may have.

    ``max_tokens`` is the token budget. While small requests arrive, a batch of bulk has at most ``bulk_tokens``.
    """

    max_tokens: int
    bulk_tokens: int | None = None
    pads: bool = True
    """Whether padding is computed."""

    def budget(self) -> BatchBudget:
        """Return the budget of a new batch."""
        return BatchBudget(self.max_tokens, self.max_tokens // FREE_PADDING_DIVISOR, pads=self.pads)


@define
class BulkBudget:
    """The token budget with which a batch of bulk takes about ``BULK_BATCH_S`` seconds, or longer if less is wasteful.

    Found by trial and not from tokens per second: a batch's duration has a constant part, so batches of one row look
    so slow that the next ones would have one row again.
    """

    _tokens: float = field(default=1.0, init=False)
    _usual_s: float = field(default=math.inf, init=False)
    """Seconds for a token of a larger batch, lately."""

    @property
    def tokens(self) -> int:
        """The budget; a longer row is a batch by itself."""
        return int(self._tokens)

    def observe(self, tokens: int, seconds: float) -> None:
        """Update the budget: down if a batch within it took too long, up if one of at least half of it did not.

        A batch of few tokens has not taken too long if most of its time is constant: see ``MOST_SLOWER``.
        """
        is_wasteful = tokens <= FEW_TOKENS and seconds > MOST_SLOWER * tokens * self._usual_s
        if tokens > FEW_TOKENS:
            each = seconds / tokens
            self._usual_s = each if math.isinf(self._usual_s) else 0.9 * self._usual_s + 0.1 * each
        if seconds > BULK_BATCH_S and not is_wasteful:
            if tokens <= self._tokens:
                self._tokens = max(1.0, self._tokens / BUDGET_STEP)
        elif 2 * tokens >= self._tokens:
            self._tokens = max(tokens, self._tokens * BUDGET_STEP)


@define
class TokenBudget:
    """The token budget of batches: halved when the device runs out of memory, and raised again step by step."""

    max_tokens: int
    tokens: int = field(init=False)
    """The budget; a longer row is a batch by itself."""
    _full_batches: int = field(default=0, init=False)

    @tokens.default
    def _all(self) -> int:
        return self.max_tokens

    def halve(self, tokens: int) -> None:
        """Update the budget: a batch of ``tokens``, counted as the budget does, ran out of memory."""
        self.tokens = max(1, min(self.tokens, tokens // 2))
        self._full_batches = 0

    def observe(self, tokens: int) -> None:
        """Update the budget: a batch of ``tokens`` succeeded."""
        if self.tokens >= self.max_tokens or 2 * tokens < self.tokens:
            return
        self._full_batches += 1
        if self._full_batches >= GROW_AFTER:
            self._full_batches = 0
            self.tokens = min(self.max_tokens, max(self.tokens + 1, int(self.tokens * BUDGET_STEP)))


@lru_cache(maxsize=4096)
def length_class(tokens: int) -> int:
    """Return the length rounded up to one of eight per octave: rows of one class are padded by an eighth at most."""
    shift = max(0, tokens.bit_length() - 4)
    return -(-tokens >> shift) << shift
