"""Which rows may be in one batch, and its limits: token budget, padding, and its tokens if it should be short."""

from functools import lru_cache

from attrs import Factory, define, field, frozen

from trio_pool_serve.types import PoolingRequest

MAX_PADDING_SHARE = 0.1
"""Share of a batch's padded tokens that may be padding."""

FREE_PADDING_DIVISOR = 64
"""A batch's token budget divided by this may always be padding: on CPU one more batch costs about as much."""

BUDGET_STEP = 1.25
"""Factor by which ``TokenBudget`` grows."""

GROW_AFTER = 8
"""Full batches that must succeed before ``TokenBudget`` grows."""


@define
class BatchBudget:
    """The token budget of a batch that is being formed, and how much of it its rows use."""

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

    def try_add_all(self, tokens: int, rows: int) -> bool:
        """Add ``rows`` rows of ``tokens`` in all if they fit whatever their lengths are; return whether they do."""
        if self.pads or self.tokens + tokens > self.max_tokens:
            return False
        self.rows += rows
        self.tokens += tokens
        return True


@frozen
class BatchLimits:
    """The limits of a device's next batch.

    ``max_tokens`` is the token budget. While small requests arrive, a batch of long work has at most
    ``short_batch_tokens``.
    """

    max_tokens: int
    short_batch_tokens: int | None = None
    pads: bool = True
    """Whether padding is computed."""

    def budget(self) -> BatchBudget:
        """Return the budget of a new batch."""
        return BatchBudget(self.max_tokens, self.max_tokens // FREE_PADDING_DIVISOR, pads=self.pads)


@define
class TokenBudget:
    """The token budget of batches: halved when the device runs out of memory, then raised step by step."""

    max_tokens: int
    tokens: int = field(init=False, default=Factory(lambda self: self.max_tokens, takes_self=True))
    """The budget; a longer row is a batch of its own."""
    _full_batches: int = field(default=0, init=False)

    def halve(self, tokens: int) -> None:
        """Shrink the budget: a batch of ``tokens``, counted as the budget does, ran out of memory."""
        self.tokens = max(1, min(self.tokens, tokens // 2))
        self._full_batches = 0

    def observe(self, tokens: int) -> None:
        """Grow the budget after ``GROW_AFTER`` batches of at least half of it: one of ``tokens`` has succeeded."""
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


def batch_key(request: PoolingRequest) -> str:
    """Return the batch key of a row: the kind of its input, its route and its adapter.

    They must be equal for rows to be computed together.
    """
    prompt, adapter = request.prompt, request.adapter
    kind = "images" if prompt.images is not None else "" if prompt.embeds is None else "embeds"
    kind = f"{kind} {prompt.route}" if prompt.route else kind
    return kind if adapter is None else f"{kind} {adapter.digest}"
