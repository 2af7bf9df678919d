"""A pool of tokenizers, one for each renderer thread."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from attrs import define, field

from trio_pool_serve.rendering.text.tokenizer import Tokenizer


@define(eq=False)
class TokenizerPool:
    """Copies of one tokenizer, each lent to one thread at a time; a fast one is the same in all threads.

    There are at least as many copies as threads that render, so one is always free. Not ``threading.local``, because
    trio's threads start and end.
    """

    first: Tokenizer
    size: int
    _free: deque[Tokenizer] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._free = deque([self.first, *(self.first.copy() for _ in range(self.size - 1))])

    @contextmanager
    def lend(self) -> Iterator[Tokenizer]:
        """Lend a tokenizer to any thread: deque's pop and append are atomic."""
        tokenizer = self._free.pop()
        try:
            yield tokenizer
        finally:
            self._free.append(tokenizer)

    def __repr__(self) -> str:
        return f"<TokenizerPool {len(self._free)} of {self.size} free>"
