"""Which rows fit into one batch: within the budget, and without much padding."""

from attrs import define, field

PADDING_SHARE = 0.1
"""The part of a batch's tokens that may be padding …"""

FREE_PADDING = 64
"""… and a batch's budget over this may be in any case: to a processor another batch costs about as much."""


@define
class BatchRoom:
    """What there is still room for in a batch that is being formed."""

    max_tokens: int
    """Padding included."""
    free_padding: int
    rows: int = field(default=0, init=False)
    tokens: int = field(default=0, init=False)
    """Without padding."""
    longest: int = field(default=0, init=False)

    @property
    def is_full(self) -> bool:
        """Whether no row fits any more, however short."""
        return self.longest * (self.rows + 1) > self.max_tokens

    def try_add(self, tokens: int) -> bool:
        """Take room for a row if it fits, and tell whether it did; the first row always does."""
        longest = max(self.longest, tokens)
        padded = longest * (self.rows + 1)
        padding = padded - self.tokens - tokens
        if self.rows and (padded > self.max_tokens or padding > max(self.free_padding, PADDING_SHARE * padded)):
            return False
        self.rows += 1
        self.tokens += tokens
        self.longest = longest
        return True


def length_class(tokens: int) -> int:
    """Return the length rounded up to one of eight per octave: rows of one class waste an eighth at most."""
    shift = max(0, tokens.bit_length() - 4)
    return -(-tokens >> shift) << shift
