"""A bound on the prepared images and token embeddings that wait for the model."""

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio
from attrs import define, field

from trio_pool_serve.types import RenderedPrompt

MAX_INPUT_BYTES = 2**30
"""The largest image of a Qwen-VL model takes 300 MB, one of CLIP 600 KB."""

MAX_CONCURRENT_PREPARATIONS = 4
"""An image's size is unknown until it is prepared: at most this many can exceed the bound."""


@define(eq=False)
class InputMemory:
    """Holds back preparing images and token embeddings while ``max_bytes`` bytes of them wait for the model.

    Admission counts tokens, and an image's are unknown before it is prepared: without this bound, kilobytes of a
    request become gigabytes as fast as they can be prepared, and wait until they are computed.
    """

    max_bytes: int = MAX_INPUT_BYTES
    held_bytes: int = field(init=False, default=0)
    _released: trio.Event = field(init=False, factory=trio.Event)
    _limiter: trio.CapacityLimiter = field(
        init=False, factory=lambda: trio.CapacityLimiter(MAX_CONCURRENT_PREPARATIONS)
    )

    @asynccontextmanager
    async def preparing(self) -> AsyncIterator[None]:
        """Prepare an input inside the block, which is entered below the limit. Cancellation: at once."""
        async with self._limiter:
            await self.wait_until_below_limit()
            yield

    async def wait_until_below_limit(self) -> None:
        """Wait while ``max_bytes`` or more are held. Cancellation: at once."""
        while self.held_bytes >= self.max_bytes:
            await self._released.wait()

    @contextmanager
    def holding(self, prompts: Iterable[RenderedPrompt]) -> Iterator[None]:
        """Count the arrays of prompts as held for the duration of the block, in which they are computed."""
        size = sum(map(_input_bytes, prompts))
        self.held_bytes += size
        try:
            yield
        finally:
            self.held_bytes -= size
            if size:
                self._released.set()
                self._released = trio.Event()

    def __repr__(self) -> str:
        return f"<InputMemory {self.held_bytes}/{self.max_bytes}>"


def _input_bytes(prompt: RenderedPrompt) -> int:
    image_bytes = 0 if prompt.images is None else prompt.images.nbytes
    return image_bytes + (0 if prompt.embeds is None else prompt.embeds.nbytes)
