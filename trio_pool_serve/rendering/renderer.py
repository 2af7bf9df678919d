"""Renders prompts for one model, off the event loop."""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt
from attrs import Factory, define

from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.prompts import (
    ChatPrompt,
    ChunkedPrompt,
    EmbedsPrompt,
    PairPrompt,
    Prompt,
    RenderingParams,
    TextPrompt,
    TokensPrompt,
)
from trio_pool_serve.rendering.chat.conversations import Conversations, errors_at
from trio_pool_serve.rendering.memory_budget import MemoryBudget
from trio_pool_serve.rendering.prompt_embeds import EmbedsFormat
from trio_pool_serve.rendering.text.text_renderer import PlainPrompt, PromptToRender, TextRenderer
from trio_pool_serve.rendering.text.tokenizer import Token, Tokenizer
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Client, RenderedPrompt, TokenIds

T = TypeVar("T")

LOOP_CHARACTERS = 320
"""Tokenising this many characters takes about as long as a thread hop (``docs/structure.md``)."""

ANYBODY = Client()


def plain_characters(prompt: PlainPrompt, params: RenderingParams) -> int:
    """Return how many characters there are to tokenise."""
    match prompt:
        case TextPrompt(text) | ChunkedPrompt(text):
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
    """Which token embeddings are accepted, or the message of the error for a model that accepts none."""
    conversations: Conversations | None = None
    """Renders conversations and contents."""
    memory: MemoryBudget = Factory(MemoryBudget)
    """Shared by all models of a server."""
    loop_characters: int = LOOP_CHARACTERS
    """Texts of at most this many characters together are rendered on the event loop."""

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt."""
        return self.texts.max_model_len

    def estimated_tokens(self, prompt: Prompt) -> int:
        """Return how many tokens to admit a prompt with: an estimate, for token embeddings an upper bound."""
        if not isinstance(prompt, EmbedsPrompt):
            return prompt.estimated_tokens
        # Without a format they are rejected when rendered.
        return 0 if isinstance(self.embeds_format, str) else self.embeds_format.estimated_tokens(prompt)

    def is_plain(self, prompt: Prompt) -> TypeGuard[PlainPrompt]:
        """Whether ``render_plain`` can render a prompt: token ids, or texts without a chat template."""
        if isinstance(prompt, TextPrompt):
            return self.conversations is None or not self.conversations.uses_chat_template
        return isinstance(prompt, ChunkedPrompt | PairPrompt | TokensPrompt)

    async def render_plain(self, prompts: Sequence[PromptToRender], client: int = 0) -> list[list[RenderedPrompt]]:
        """Return the rows of each of several prompts: one, or one for each window of a long text.

        Longer texts are rendered in the turn of ``client``, a client's number, as in all functions here.

        Errors and cancellation: as ``render``; the first failure ends all.
        """
        if sum([plain_characters(prompt, params) for prompt, params, _ in prompts]) <= self.loop_characters:
            began = time.perf_counter()
            rows = self.texts.render_rows(prompts)
            self.offload.observe("render", 0.0, time.perf_counter() - began)
        else:
            rows = await self.offload.in_turn(client, partial(self.texts.render_rows, prompts))
        self._refuse_placeholders(chain.from_iterable(rows))
        return rows

    async def render(self, prompt: Prompt, params: RenderingParams, client: Client = ANYBODY) -> RenderedPrompt:
        """Return the model input of one prompt, whose images take memory of ``client``.

        Raises ``ContextLengthError``, ``InvalidRequestError`` or ``MediaError``. Cancellation: at once, while waiting
        for a thread and while one works; the thread keeps its limiter token until it finishes.
        """
        rendered = await self._render(prompt, params, client)
        self._refuse_placeholders([rendered])
        return rendered

    async def _render(self, prompt: Prompt, params: RenderingParams, client: Client) -> RenderedPrompt:
        if isinstance(prompt, TokensPrompt):
            return self.texts.render(prompt, params)  # hardly any time
        if isinstance(prompt, ChunkedPrompt | PairPrompt) or self.is_plain(prompt):
            return await self.offload.in_turn(client.number, partial(self.texts.render, prompt, params))
        if isinstance(prompt, EmbedsPrompt):
            return await self._render_embeds(prompt, params, client.number)
        if self.conversations is not None:
            return await self.conversations.render(prompt, params, client)
        raise InvalidRequestError("An input is not a text; this model reads texts only.", field="prompts")

    async def _render_embeds(self, prompt: EmbedsPrompt, params: RenderingParams, client: int) -> RenderedPrompt:
        embeds_format = self.embeds_format
        if isinstance(embeds_format, str):
            raise InvalidRequestError(embeds_format, field="prompts")
        with errors_at(prompt.place):
            async with self.memory.preparing(client):
                return await self.offload.in_turn(client, partial(embeds_format.render, prompt, params))

    def _refuse_placeholders(self, rows: Iterable[RenderedPrompt]) -> None:
        """Reject image placeholders without an image in texts and token ids, which would fail the whole batch."""
        if self.conversations is not None and self.conversations.image_format is not None:
            for row in rows:
                if row.images is None:
                    self.conversations.image_format.expand(row.token_ids, ())

    async def conversation_text(self, prompt: ChatPrompt, client: int = 0) -> str:
        """Return the text that a chat template makes of a conversation. Errors and cancellation: as ``render``."""
        if self.conversations is None:
            raise InvalidRequestError("An input is not a text; this model reads texts only.", field="prompts")
        return await self.conversations.text_of(prompt, client)

    async def tokenize(self, text: str, client: int = 0, *, add_special_tokens: bool) -> list[Token]:
        """Return all tokens of a text. Errors and cancellation: as ``render``."""
        return await self._with_tokenizer(
            client, lambda tokenizer: tokenizer.tokens(text, add_special_tokens=add_special_tokens)
        )

    async def pieces(self, token_ids: TokenIds, client: int = 0) -> list[str]:
        """Return the vocabulary's entry of each id, which must be in the vocabulary. Cancellation: as ``render``."""
        return await self._with_tokenizer(client, lambda tokenizer: tokenizer.pieces(token_ids.tolist()))

    async def detokenize(self, token_ids: npt.NDArray[np.int64], client: int = 0, *, skip_special_tokens: bool) -> str:
        """Return the text of token ids, which must be in the vocabulary. Cancellation: as ``render``."""
        return await self._with_tokenizer(
            client, lambda tokenizer: tokenizer.decode(token_ids.tolist(), skip_special_tokens=skip_special_tokens)
        )

    async def _with_tokenizer(self, client: int, use: Callable[[Tokenizer], T]) -> T:
        return await self.offload.in_turn(client, partial(self.texts.with_tokenizer, use))
