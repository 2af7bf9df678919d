"""Putting another way to render in the place of ours."""

import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from trio_pool_serve.cli import read_config, run
from trio_pool_serve.processes.child_process import run_as_child
from trio_pool_serve.prompts import PairPrompt, RenderingParams, TextPrompt, TokensPrompt
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.rendering.text.text_renderer import PromptToRender
from trio_pool_serve.server import api_process, api_workers
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.types import RenderedPrompt

RenderText: TypeAlias = Callable[[Renderer, TextPrompt | PairPrompt, RenderingParams], Awaitable[RenderedPrompt]]


def put_in_place(name: str, render_text: RenderText) -> None:
    """Make every renderer of this process use ``render_text``, and every ``Server-Timing`` header contain ``name``."""
    ours, render_plain = RequestTimings.server_timing, Renderer.render_plain

    def server_timing(timings: RequestTimings) -> str:
        return f"{ours(timings)}, {label(name)}"

    async def render_each(
        renderer: Renderer, prompts: Sequence[PromptToRender], client: int
    ) -> list[list[RenderedPrompt]]:
        rendered = []
        for prompt, params, in_windows in prompts:
            if isinstance(prompt, TokensPrompt) or in_windows:
                rendered += await render_plain(renderer, [(prompt, params, in_windows)], client)
            else:
                rendered.append([await render_text(renderer, prompt, params)])
        return rendered

    Renderer.render_plain = render_each  # type: ignore[method-assign]
    RequestTimings.server_timing = server_timing  # type: ignore[method-assign]


def label(name: str) -> str:
    """Return what a front end's answers have in ``Server-Timing``."""
    return f'frontend;desc="{name}"'


def serve(module: str) -> None:
    """Serve until SIGTERM, as our own command does. With API processes, which run ``module`` too, be one of them."""
    if sys.argv[1].isdigit():  # the channel of a child
        run_as_child(api_process.main, api_workers.FromParent)
    api_workers.MODULE = module
    sys.exit(run(read_config(sys.argv[1:])))
