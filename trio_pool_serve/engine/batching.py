"""Which rows fit into one batch: within the budget, and without much padding; and how much bulk does."""

from attrs import define, field

PADDING_SHARE = 0.1
"""The part of a batch's tokens that may be padding …"""

FREE_PADDING = 64
"""… and a batch's budget over this may be in any case: to a processor another batch costs about as much."""

PADDED_MEMORY = 4
"""Where padding is not computed, padded rows may be so many times the budget: their states are kept all the same."""

BUDGET_STEP = 1.25


@define
class BatchRoom:
    """What there is still room for in a batch that is being formed."""

    max_tokens: int
    """Padding included, if it is computed."""
    free_padding: int
    pads: bool = True
    """Whether padding is computed. If not, it takes memory only."""
    rows: int = field(default=0, init=False)
    tokens: int = field(default=0, init=False)
    """Without padding."""
    longest: int = field(default=0, init=False)

    @property
    def is_full(self) -> bool:
        """Whether no row fits any more, however short."""
        return self.longest * (self.rows + 1) > self._max_padded

    @property
    def _max_padded(self) -> int:
        return self.max_tokens if self.pads else self.max_tokens * PADDED_MEMORY

    def _fits(self, tokens: int, padded: int) -> bool:
        if padded > self._max_padded:
            return False
        if not self.pads:
            return tokens <= self.max_tokens
        return padded - tokens <= max(self.free_padding, PADDING_SHARE * padded)

    def try_add(self, tokens: int) -> bool:
        """Take room for a row if it fits, and tell whether it did; the first row always does."""
        longest = max(self.longest, tokens)
        padded = longest * (self.rows + 1)
        if self.rows and not self._fits(self.tokens + tokens, padded):
            return False
        self.rows += 1
        self.tokens += tokens
        self.longest = longest
        return True


@define
class BulkBudget:
    """How many tokens of bulk a batch may have to take about ``target_s``.

    Tried out, because no rate tells it: what a batch takes has a part that does not depend on its tokens, so batches
    of one row look so slow that the next ones would be of one row again.
    """

    target_s: float
    _tokens: float = field(default=1.0, init=False)

    @property
    def tokens(self) -> int:
        """The budget; a row that is longer rides alone."""
        return int(self._tokens)

    def observe(self, tokens: int, seconds: float) -> None:
        """Take note of what a batch took: one within the budget may be too long, one about as large too short."""
        if seconds > self.target_s:
            if tokens <= self._tokens:
                self._tokens = max(1.0, self._tokens / BUDGET_STEP)
        elif 2 * tokens >= self._tokens:
            self._tokens = max(tokens, self._tokens * BUDGET_STEP)


def length_class(tokens: int) -> int:
    """Return the length rounded up to one of eight per octave: rows of one class waste an eighth at most."""
    shift = max(0, tokens.bit_length() - 4)
    return -(-tokens >> shift) << shift
