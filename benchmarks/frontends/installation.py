"""Putting another way to render in the place of ours."""

import sys
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from trio_pool_serve.cli import read_config, run
from trio_pool_serve.prompts import PairPrompt, RenderingParams, TextPrompt
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.types import RenderedPrompt

RenderText: TypeAlias = Callable[[Renderer, TextPrompt | PairPrompt, RenderingParams], Awaitable[RenderedPrompt]]

IN_PLACE = ("__main__", "__mp_main__")
"""What a front end's module is called in the process that is started, and in those that this starts in its turn."""


def put_in_place(name: str, render_text: RenderText) -> None:
    """Have every renderer of this process render texts so, and every answer say it, in ``Server-Timing``."""
    ours = RequestTimings.server_timing

    def server_timing(timings: RequestTimings) -> str:
        return f"{ours(timings)}, {label(name)}"

    Renderer.render_text = render_text  # type: ignore[method-assign]
    RequestTimings.server_timing = server_timing  # type: ignore[method-assign]


def label(name: str) -> str:
    """Return what a front end's answers have in ``Server-Timing``."""
    return f'frontend;desc="{name}"'


def serve() -> None:
    """Serve until SIGTERM, as our own command does."""
    sys.exit(run(read_config(sys.argv[1:])))
