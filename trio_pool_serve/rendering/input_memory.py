"""How much of what was made of images and of token embeddings waits for the model."""

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio
from attrs import define, field

from trio_pool_serve.types import RenderedPrompt

MAX_INPUT_BYTES = 2**30
"""The largest image of a Qwen-VL model takes 300 MB, one of CLIP 600 KB."""

MADE_AT_ONCE = 4
"""Nobody knows how large an image becomes until it is made: so many may pass the bound."""


@define(eq=False)
class InputMemory:
    """Keeps images and token embeddings from being made ready while ``most`` bytes of such wait for the model.

    Admission counts tokens, and nobody knows an image's before it has been looked at: without this, kilobytes of a
    request become gigabytes as fast as they are made, and wait until they are computed.
    """

    most: int = MAX_INPUT_BYTES
    held: int = field(init=False, default=0)
    _room: trio.Event = field(init=False, factory=trio.Event)
    _making: trio.CapacityLimiter = field(init=False, factory=lambda: trio.CapacityLimiter(MADE_AT_ONCE))

    @asynccontextmanager
    async def room(self) -> AsyncIterator[None]:
        """Make something ready inside the block, which is entered when there is room. Cancellation: at once."""
        async with self._making:
            await self.until_there_is_room()
            yield

    async def until_there_is_room(self) -> None:
        """Wait while too much is held. Cancellation: at once."""
        while self.held >= self.most:
            await self._room.wait()

    @contextmanager
    def holding(self, prompts: Iterable[RenderedPrompt]) -> Iterator[None]:
        """Count what was made ready for as long as the block, in which it is computed."""
        size = sum(map(_size, prompts))
        self.held += size
        try:
            yield
        finally:
            self.held -= size
            if size:
                self._room.set()
                self._room = trio.Event()

    def __repr__(self) -> str:
        return f"<InputMemory {self.held}/{self.most}>"


def _size(prompt: RenderedPrompt) -> int:
    of_images = 0 if prompt.images is None else prompt.images.nbytes
    return of_images + (0 if prompt.embeds is None else prompt.embeds.nbytes)
