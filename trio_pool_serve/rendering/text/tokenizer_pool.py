"""A tokenizer for each renderer thread."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from attrs import define, field

from trio_pool_serve.rendering.text.tokenizer import Tokenizer


@define(eq=False)
class TokenizerPool:
    """Copies of one tokenizer, lent to one thread at a time.

    As many copies as the ``render`` limiter has tokens, so there is always one to lend. Not
    ``threading.local``: trio's threads come and go.
    """

    first: Tokenizer
    size: int
    _free: deque[Tokenizer] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._free = deque([self.first, *(self.first.copy() for _ in range(self.size - 1))])

    @contextmanager
    def lend(self) -> Iterator[Tokenizer]:
        """Lend a tokenizer; deque's pop and append are atomic, so any thread may ask."""
        tokenizer = self._free.pop()
        try:
            yield tokenizer
        finally:
            self._free.append(tokenizer)

    def __repr__(self) -> str:
        return f"<TokenizerPool {len(self._free)} of {self.size} free>"
