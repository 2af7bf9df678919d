"""A tokenizer that waits for company: texts of all requests are collected, and tokenised together in one thread.

The way of vLLM #27407, with its times: at most 32 texts, which wait for each other for at most 2 ms.
"""

from functools import partial

import outcome
import trio
from attrs import define, field

from benchmarks.frontends.installation import put_in_place, serve
from benchmarks.frontends.steps import encode, finish, format_ids, has_steps
from trio_pool_serve.prompts import PairPrompt, RenderingParams, TextPrompt
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.rendering.text.text_renderer import TextRenderer
from trio_pool_serve.types import RenderedPrompt

NAME = "micro-batching"

MOST_TEXTS = 32

WAIT_S = 0.002


@define(eq=False)
class Waiting:
    """A text that waits for others, and then for its tokens."""

    text: str
    params: RenderingParams
    done: trio.Event = field(factory=trio.Event)
    rendered: outcome.Outcome[RenderedPrompt] | None = None


@define(eq=False)
class Collector:
    """Collects the texts of one renderer; lives as long as the server."""

    renderer: Renderer
    _arrived: trio.MemorySendChannel[Waiting] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._arrived, arrivals = trio.open_memory_channel[Waiting](float("inf"))
        # A server's loop is the only thing here that lives as long as its requests.
        trio.lowlevel.spawn_system_task(self._collect, arrivals)

    async def render(self, text: str, params: RenderingParams) -> RenderedPrompt:
        """Render one text, with others. Cancellation: at once; the text is tokenised all the same."""
        waiting = Waiting(text, params)
        self._arrived.send_nowait(waiting)
        await waiting.done.wait()
        assert waiting.rendered is not None
        return waiting.rendered.unwrap()

    async def _collect(self, arrivals: trio.MemoryReceiveChannel[Waiting]) -> None:
        async for first in arrivals:
            batch = [first]
            with trio.move_on_after(WAIT_S):
                while len(batch) < MOST_TEXTS:
                    try:
                        batch.append(arrivals.receive_nowait())
                    except trio.WouldBlock:
                        batch.append(await arrivals.receive())
            await self.renderer.offload.run("render", partial(_render_all, self.renderer.texts, batch))
            for waiting in batch:
                waiting.done.set()


def _render_all(texts: TextRenderer, batch: list[Waiting]) -> None:
    try:
        encodings = encode(texts, [waiting.text for waiting in batch])
    except TypeError:  # one of them is not Unicode, but the error does not have its index
        for waiting in batch:
            waiting.rendered = outcome.capture(texts.render, TextPrompt(waiting.text), waiting.params)
        return
    for waiting, encoded in zip(batch, encodings, strict=True):
        waiting.rendered = outcome.capture(_render_one, texts, encoded, waiting.params)


def _render_one(texts: TextRenderer, encoded: object, params: RenderingParams) -> RenderedPrompt:
    return format_ids(texts, finish(texts, encoded, params), params)


collectors: dict[int, Collector] = {}
"""By the id of the renderer, which its collector keeps alive."""


async def render_text(renderer: Renderer, prompt: TextPrompt | PairPrompt, params: RenderingParams) -> RenderedPrompt:
    """Render together with all other texts of the next 2 ms."""
    if not has_steps(renderer.texts, prompt, params):
        render = partial(renderer.texts.render, prompt, params)
        return await renderer.offload.run("render", render, abandon_on_cancel=True)
    assert isinstance(prompt, TextPrompt)
    if id(renderer) not in collectors:
        collectors[id(renderer)] = Collector(renderer)
    return await collectors[id(renderer)].render(prompt.text, params)


if __name__ == "__main__":
    put_in_place(NAME, render_text)
    serve("benchmarks.frontends.micro_batching")
