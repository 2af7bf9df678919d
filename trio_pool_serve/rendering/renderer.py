"""Prompts to what the model reads, off the loop."""

import time
from collections.abc import Sequence
from functools import partial
from typing import TypeGuard

import numpy as np
import numpy.typing as npt
from attrs import Factory, define

from trio_pool_serve.errors import InvalidRequestError, at_place
from trio_pool_serve.prompts import (
    EmbedsPrompt,
    PairPrompt,
    Prompt,
    RenderingParams,
    TextPrompt,
    TokensPrompt,
)
from trio_pool_serve.rendering.chat.conversations import Conversations
from trio_pool_serve.rendering.embeds.prompt_embeds import EmbedsFormat
from trio_pool_serve.rendering.input_memory import InputMemory
from trio_pool_serve.rendering.text.text_renderer import PlainPrompt, PromptToRender, TextRenderer
from trio_pool_serve.rendering.text.token_info import Token
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import RenderedPrompt

LOOP_CHARACTERS = 320
"""Such texts take about as long as a thread hop (``benchmarks/hop_size.py``)."""


def plain_characters(prompt: PlainPrompt, params: RenderingParams) -> int:
    """Return how much text there is to tokenise."""
    match prompt:
        case TextPrompt(text):
            return len(text) + len(params.instruction)
        case PairPrompt():
            return len(prompt.first) + len(prompt.second) + len(params.instruction)
        case TokensPrompt():
            return 0


@define(eq=False)
class Renderer:
    """Renders prompts for one model: short texts on the event loop, all else in ``render`` threads."""

    texts: TextRenderer
    offload: Offload
    embeds_format: EmbedsFormat | str = "This model is read from texts."
    """Which token embeddings are taken in place of texts, or why none are."""
    conversations: Conversations | None = None
    """Reads whatever is not a text by itself; set once there is a renderer that it can read texts with."""
    input_memory: InputMemory = Factory(InputMemory)
    """Shared by all models of a server."""
    loop_characters: int = LOOP_CHARACTERS
    """Texts of so many characters altogether are rendered on the event loop."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt."""
        return self.texts.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are less."""
        return self.texts.vocab_size

    def estimated_tokens(self, prompt: Prompt) -> int:
        """Return cheaply how many tokens a prompt may have, for admission: a guess, of token embeddings a bound."""
        if not isinstance(prompt, EmbedsPrompt):
            return prompt.estimated_tokens
        # Without a format they are refused.
        return 0 if isinstance(self.embeds_format, str) else self.embeds_format.estimated_tokens(prompt)

    def is_plain(self, prompt: Prompt) -> TypeGuard[PlainPrompt]:
        """Whether a prompt is a text, or tokens, to be read as it is: ``render_plain`` takes several of those."""
        if isinstance(prompt, PairPrompt | TokensPrompt):
            return True
        return isinstance(prompt, TextPrompt) and not self._in_conversation

    async def render_plain(self, asked: Sequence[PromptToRender]) -> list[list[RenderedPrompt]]:
        """Return what the model reads for each of several prompts, in one pass each, or in windows.

        Raises and is cancelled as ``render``; the first failure ends all.
        """
        if sum(plain_characters(prompt, params) for prompt, params, _ in asked) <= self.loop_characters:
            began = time.perf_counter()
            rows = self.texts.render_rows(asked)
            self.offload.observe("render", 0.0, time.perf_counter() - began)
        else:
            rows = await self.offload.run("render", partial(self.texts.render_rows, asked), abandon_on_cancel=True)
        for windows in rows:
            for window in windows:
                self._without_placeholders(window)
        return rows

    async def render(self, prompt: Prompt, params: RenderingParams) -> RenderedPrompt:
        """Return what the model reads for one prompt.

        Raises ``ContextLengthError``, ``InvalidRequestError`` or ``MediaError``. Cancellation: while waiting for a
        thread and while one works, at once; the thread keeps its token until it is done.
        """
        return self._without_placeholders(await self._render(prompt, params))

    async def _render(self, prompt: Prompt, params: RenderingParams) -> RenderedPrompt:
        if isinstance(prompt, TokensPrompt):
            return self.texts.render_tokens(prompt, params)
        if isinstance(prompt, PairPrompt) or (isinstance(prompt, TextPrompt) and not self._in_conversation):
            return await self.render_text(prompt, params)
        if isinstance(prompt, EmbedsPrompt):
            return await self._render_embeds(prompt, params)
        if self.conversations is not None:
            return await self.conversations.render(prompt, params)
        raise InvalidRequestError("This model reads texts only.", field="prompts")

    @property
    def _in_conversation(self) -> bool:
        return self.conversations is not None and self.conversations.uses_chat_template

    async def render_text(self, prompt: TextPrompt | PairPrompt, params: RenderingParams) -> RenderedPrompt:
        """Return what the model reads for a text as it is. Raises and is cancelled as ``render``."""
        return await self.offload.run("render", partial(self.texts.render, prompt, params), abandon_on_cancel=True)

    async def shorten(self, text: str, tokens: int) -> str:
        """Return the beginning of a text that makes so many tokens. Raises and is cancelled as ``render``."""
        return await self.offload.run("render", partial(self.texts.shorten, text, tokens), abandon_on_cancel=True)

    async def _render_embeds(self, prompt: EmbedsPrompt, params: RenderingParams) -> RenderedPrompt:
        embeds_format = self.embeds_format
        if isinstance(embeds_format, str):
            raise InvalidRequestError(embeds_format, field="prompts")
        try:
            async with self.input_memory.preparing():
                render = partial(embeds_format.render, prompt, params)
                return await self.offload.run("render", render, abandon_on_cancel=True)
        except InvalidRequestError as error:
            raise at_place(prompt.place, error) from error

    def _without_placeholders(self, rendered: RenderedPrompt) -> RenderedPrompt:
        """Refuse a text, or ids, with a placeholder that no image is for: a batch of others would fail by it."""
        if rendered.images is None and self.conversations is not None and self.conversations.image_format is not None:
            self.conversations.image_format.expand(rendered.token_ids, ())
        return rendered

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[Token]:
        """Return a text's tokens, none cut off. Raises and is cancelled as ``render``."""
        tokenize = partial(self.texts.tokenize, text, add_special_tokens=add_special_tokens)
        return await self.offload.run("render", tokenize, abandon_on_cancel=True)

    async def detokenize(self, token_ids: npt.NDArray[np.int64], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids, which must be in the vocabulary. Is cancelled as ``render``."""
        detokenize = partial(self.texts.detokenize, token_ids, skip_special_tokens=skip_special_tokens)
        return await self.offload.run("render", detokenize, abandon_on_cancel=True)
