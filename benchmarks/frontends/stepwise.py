"""An asynchronous renderer: each of its steps is one thread hop."""

from functools import partial

from benchmarks.frontends.installation import put_in_place, serve
from benchmarks.frontends.steps import encode, finish, format_ids, has_steps
from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.prompts import PairPrompt, RenderingParams, TextPrompt
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.types import RenderedPrompt

NAME = "stepwise"


async def render_text(renderer: Renderer, prompt: TextPrompt | PairPrompt, params: RenderingParams) -> RenderedPrompt:
    """Tokenise, cut, and put together."""
    texts, hop = renderer.texts, partial(renderer.offload.run, "render", abandon_on_cancel=True)
    if not has_steps(texts, prompt, params):
        return await hop(partial(texts.render, prompt, params))
    assert isinstance(prompt, TextPrompt)
    try:
        (encoded,) = await hop(partial(encode, texts, [prompt.text]))
    except TypeError as error:
        raise InvalidRequestError("An input is not valid Unicode text.", param="input") from error
    token_ids = await hop(partial(finish, texts, encoded, params))
    return await hop(partial(format_ids, texts, token_ids, params))


if __name__ == "__main__":
    put_in_place(NAME, render_text)
    serve("benchmarks.frontends.stepwise")
