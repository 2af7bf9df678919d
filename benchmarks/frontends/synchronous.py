"""Everything but the forward pass on the event loop: bodies, texts and answers of any size."""

from collections.abc import Callable
from typing import TypeVar

import trio

from benchmarks.frontends.installation import put_in_place, serve
from trio_pool_serve.prompts import PairPrompt, RenderingParams, TextPrompt
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.threads.offload import LimiterName, Offload
from trio_pool_serve.types import RenderedPrompt

T = TypeVar("T")

NAME = "synchronous"

OFF_THE_LOOP: tuple[LimiterName, ...] = ("load", "launch", "copy")
"""The engine's work: it is the same as ours."""


async def render_text(renderer: Renderer, prompt: TextPrompt | PairPrompt, params: RenderingParams) -> RenderedPrompt:
    """Render here and now."""
    await trio.lowlevel.checkpoint()
    return renderer.texts.render(prompt, params)


def stay_on_the_loop() -> None:
    """Have all other work that goes to threads done on the loop."""
    in_threads = Offload.run

    async def run(offload: Offload, kind: LimiterName, blocking: Callable[[], T], **options: bool) -> T:
        if kind in OFF_THE_LOOP:
            return await in_threads(offload, kind, blocking, **options)
        await trio.lowlevel.checkpoint()
        return blocking()

    Offload.run = run  # type: ignore[method-assign]


if __name__ == "__main__":
    put_in_place(NAME, render_text)
    stay_on_the_loop()
    serve("benchmarks.frontends.synchronous")
