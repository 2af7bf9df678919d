"""Images without pixels: a loader and a format whose answers are known, and which wait or fail when told to."""

from contextlib import contextmanager

import attrs
import numpy as np
import trio
from attrs import define, field

from trio_pool_serve.errors import InvalidRequestError, MediaError
from trio_pool_serve.rendering.memory_budget import MemoryBudget
from trio_pool_serve.types import ImageFeatures, RenderedPrompt


@attrs.frozen
class ScriptedProcessor:
    """Never called: the loader below makes its features itself."""

    key: str = "scripted"


@define(eq=False)
class ScriptedLoader:
    """The image of ``tokens:3`` takes three positions; one of ``broken:`` cannot be fetched, one of ``slow:`` is never
    prepared.

    Clear ``gate`` to have fetching wait.
    """

    memory: MemoryBudget = field(factory=MemoryBudget, init=False)
    loading: int = field(default=0, init=False)
    loaded: list[str] = field(factory=list, init=False)
    cancelled: list[str] = field(factory=list, init=False)
    gate: trio.Event = field(factory=trio.Event, init=False)

    async def fetch(self, part, held):
        with self._loading(part):
            if part.url.startswith("broken:"):
                await trio.lowlevel.checkpoint()
                raise MediaError("The image is broken.")
            await self.gate.wait()
            return part

    async def load(self, part, processor, client):
        with self._loading(part):
            await trio.lowlevel.checkpoint()
            kind, _, count = part.url.partition(":")
            if kind == "slow":
                await trio.sleep_forever()
            self.loaded.append(part.url)
            return ImageFeatures({"pixel_values": np.full((1, 2), int(count), np.float32)}, (int(count),))

    @contextmanager
    def _loading(self, part):
        self.loading += 1
        try:
            yield
        except trio.Cancelled:
            self.cancelled.append(part.url)
            raise
        finally:
            self.loading -= 1


@attrs.frozen
class ScriptedFormat:
    """Each ``placeholder`` becomes as many as its image takes positions."""

    placeholder: int
    alone_has_a_form: bool = False
    processor: ScriptedProcessor = ScriptedProcessor()

    def alone(self, image):
        if not self.alone_has_a_form:
            return None
        return RenderedPrompt(np.zeros(sum(image.tokens), dtype=np.int32), images=image)

    def expand(self, token_ids, images):
        places = np.flatnonzero(token_ids == self.placeholder)
        if len(places) != len(images):
            raise InvalidRequestError(f"{len(places)} places for {len(images)} images.")
        if not images:
            return RenderedPrompt(token_ids)
        repeats = np.ones(len(token_ids), dtype=int)
        repeats[places] = [sum(image.tokens) for image in images]
        together = ImageFeatures(
            {"pixel_values": np.concatenate([image.arrays["pixel_values"] for image in images])},
            tuple(tokens for image in images for tokens in image.tokens),
        )
        return RenderedPrompt(np.repeat(token_ids, repeats).astype(np.int32), images=together)
