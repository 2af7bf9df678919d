"""Renders texts, pairs and token ids with a tokenizer. Blocking."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np
from attrs import Factory, define, evolve, field

from trio_pool_serve.errors import ContextLengthError, InvalidRequestError, require_request
from trio_pool_serve.prompts import ChunkedPrompt, InputType, PairPrompt, RenderingParams, TextPrompt, TokensPrompt
from trio_pool_serve.rendering.text.chunk_tokens import tokens_of_chunks
from trio_pool_serve.rendering.text.excerpt import CHARACTERS_PER_TOKEN, MARGIN_TOKENS, encode_excerpt, shorten
from trio_pool_serve.rendering.text.long_text import encode_input, too_long, windows_of
from trio_pool_serve.rendering.text.pair_format import PairFormat
from trio_pool_serve.rendering.text.text_format import TextFormat
from trio_pool_serve.rendering.text.tokenizer import Encoded, Tokenizer, TokenizerPool
from trio_pool_serve.types import RenderedPrompt, TokenIds

T = TypeVar("T")

PlainPrompt: TypeAlias = TextPrompt | ChunkedPrompt | PairPrompt | TokensPrompt
"""Prompts that need a tokenizer at most: no chat template, images or token embeddings."""

PromptToRender: TypeAlias = tuple[PlainPrompt, RenderingParams, bool]
"""A prompt, its rendering params, and whether a text that is too long is divided into windows."""


@define(eq=False)
class TextRenderer:
    """Renders plain prompts for one model, in up to one thread per tokenizer at a time."""

    tokenizers: TokenizerPool
    max_model_len: int = field(kw_only=True)
    vocab_size: int = field(kw_only=True)
    """Size of the vocabulary: token ids are smaller."""
    pools_instruction: bool = field(default=True, kw_only=True)
    pair_format: PairFormat = field(factory=PairFormat, kw_only=True)
    text_format: TextFormat = field(factory=TextFormat, kw_only=True)
    route: int = field(default=0, kw_only=True)
    """The number of the route that it renders for."""
    routes: "Mapping[InputType | None, TextRenderer]" = field(factory=dict, kw_only=True)
    """The renderers of a model with several routes, by the input types that have one; empty for other models."""
    _instruction_tokens: Callable[[Tokenizer, str, bool], int] = field(
        init=False,
        default=Factory(
            lambda self: lru_cache(MAX_KNOWN_INSTRUCTIONS)(partial(_count_alone, most=self.max_model_len)),
            takes_self=True,
        ),
    )
    """Counts an instruction, and remembers it."""

    def render(self, prompt: PlainPrompt, params: RenderingParams) -> RenderedPrompt:
        """Return the model input. Raises ``ContextLengthError`` or ``InvalidRequestError``."""
        (row,) = self.rows_of(prompt, params)
        return row

    def render_rows(self, prompts: Sequence[PromptToRender]) -> list[list[RenderedPrompt]]:
        """Return the rows of each of several prompts: one, or one for each window. Raises as ``render``.

        Several at once, because a thread hop takes as long as rendering one short text.
        """
        rows, known = [], self._encode_short(prompts)
        for index, (prompt, params, in_windows) in enumerate(prompts):
            try:
                rows.append(self.rows_of(prompt, params, known.get(index), in_windows=in_windows))
            except InvalidRequestError as error:
                error.row = index
                raise
        return rows

    def rows_of(
        self, prompt: PlainPrompt, params: RenderingParams, encoded: Encoded | None = None, *, in_windows: bool = False
    ) -> list[RenderedPrompt]:
        """Return the rows of a prompt; ``encoded`` are the tokens of a text if they are known. Raises as ``render``."""
        if self.routes:
            own, params = self._of_route(params)
            rows = own.rows_of(prompt, params, in_windows=in_windows)
            return [msgspec.structs.replace(row, route=own.route) for row in rows]
        if isinstance(prompt, TokensPrompt):
            return [self._render_tokens(prompt, params)]
        if isinstance(prompt, PairPrompt):
            return [self._render_pair(prompt, params)]
        if in_windows and isinstance(prompt, TextPrompt):
            return self.render_windows(prompt, params, encoded)
        return [self._render_text(prompt, params, encoded)]

    def _render_pair(self, prompt: PairPrompt, params: RenderingParams) -> RenderedPrompt:
        with self.tokenizers.lend() as tokenizer:
            rendered = self.pair_format.render(tokenizer, prompt, params, self.max_model_len)
        require_request(len(rendered.token_ids) > 0, "An input has no tokens.", field="prompts")
        return rendered

    def _encode_short(self, prompts: Sequence[PromptToRender]) -> Mapping[int, Encoded]:
        """Return the tokens of the short texts among several prompts, by index.

        All in one call: threads that take the interpreter lock again after each text mostly wait for each other.
        """
        if self.routes or self.tokenizers.first.has_short_ids:
            return {}
        texts = {
            index: text
            for index, (prompt, params, _) in enumerate(prompts)
            if isinstance(prompt, TextPrompt) and params.max_text_tokens is None
            if len(text := self.text_format.prefix + params.instruction + prompt.text) <= ALWAYS_READ
        }
        if len(texts) < 2:
            return {}
        with self.tokenizers.lend() as tokenizer:
            try:
                return dict(zip(texts, tokenizer.encode_all([*texts.values()]), strict=True))
            except UnicodeError:
                return {}  # one by one, for the error to name its prompt

    def render_windows(
        self, prompt: TextPrompt, params: RenderingParams, encoded: Encoded | None = None
    ) -> list[RenderedPrompt]:
        """Return one row, or one for each window of a text that is too long, of a model without routes.

        ``encoded`` are the tokens of the text, if they are known. Raises as ``render``.
        """
        with suppress(ContextLengthError):
            return [self._render_text(prompt, params, encoded)]
        with self.tokenizers.lend() as tokenizer:
            adds_special_tokens = params.add_special_tokens and self.text_format.adds_special_tokens(params.input_type)
            windows = windows_of(
                tokenizer, params.instruction, prompt.text, self.max_model_len, adds_special_tokens=adds_special_tokens
            )
            instruction = self._count_instruction_tokens(tokenizer, params)
            return [RenderedPrompt(window, instruction) for window in windows]

    def _of_route(self, params: RenderingParams) -> "tuple[TextRenderer, RenderingParams]":
        """Return the renderer of a text's route, and the params for it: the model's maximum length is the route's own.

        Raises ``InvalidRequestError``.
        """
        if (own := self.routes.get(params.input_type)) is None:
            wanted, known = (
                f"the input_type '{params.input_type}'" if params.input_type else "no input_type",
                " or ".join(sorted(filter(None, self.routes))),
            )
            raise InvalidRequestError(f"An input has {wanted}; this model accepts {known}.", field="prompts")
        is_longest = params.truncate_to == self.max_model_len
        return own, evolve(params, truncate_to=own.max_model_len) if is_longest else params

    def with_tokenizer(self, use: Callable[[Tokenizer], T]) -> T:
        """Return the result of ``use`` with a tokenizer. Raises ``InvalidRequestError`` for text that is no Unicode."""
        with self.tokenizers.lend() as tokenizer:
            return use(tokenizer)

    def _render_tokens(self, prompt: TokensPrompt, params: RenderingParams) -> RenderedPrompt:
        """Return the model input of token ids. Needs no tokenizer and hardly any time; raises as ``render``."""
        params, most = self.text_format.limited(params, self.max_model_len)
        ids, keep = prompt.token_ids, min(most, params.truncate_to or most)
        if params.truncate_to is not None and len(ids) > keep:
            ids = ids[:keep] if params.truncation_side == "right" else ids[-keep:]
        require_request(len(ids) > 0, "An input has no tokens.", field="prompts")
        if len(ids) > most:
            raise too_long(f"{len(ids)}", most)
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(outside):
            raise InvalidRequestError(
                f"An input has the token id {outside[0]}; this model's vocabulary has the ids 0 to "
                f"{self.vocab_size - 1}. Did another model's tokenizer make it? With langchain-openai, set "
                "check_embedding_ctx_length=False to send texts.",
                field="prompts",
            )
        return self.text_format.finish(ids.astype(np.int32), params.input_type)

    def _render_text(
        self, prompt: TextPrompt | ChunkedPrompt, params: RenderingParams, encoded: Encoded | None
    ) -> RenderedPrompt:
        params, most = self.text_format.limited(params, self.max_model_len)
        with self.tokenizers.lend() as tokenizer:
            adds_special_tokens = params.add_special_tokens and self.text_format.adds_special_tokens(params.input_type)
            special = tokenizer.special_tokens if adds_special_tokens else 0
            before = self.text_format.prefix + params.instruction
            text = before + shorten(tokenizer, prompt.text, params.max_text_tokens)
            is_chunked = isinstance(prompt, ChunkedPrompt)
            instruction_tokens = self._count_instruction_tokens(tokenizer, params)
            if encoded is None and not is_chunked and len(text) <= ALWAYS_READ:
                short = tokenizer.short_ids(text, add_special_tokens=adds_special_tokens)
                if short is not None and special < len(short) <= min(most, params.truncate_to or most):
                    return _with_instruction(self.text_format.finish(short, params.input_type), instruction_tokens)
            excerpt, keep = encode_input(tokenizer, text, params, most, special, positions=is_chunked, encoded=encoded)
            # Read before the tokens are truncated in place.
            is_instruction_cut = instruction_tokens > 0 and not excerpt.fits(keep)
            if isinstance(prompt, ChunkedPrompt):
                token_ids, positions = tokenizer.finish_with_positions(
                    excerpt.encoded, keep, params.truncation_side, add_special_tokens=adds_special_tokens
                )
                positions[positions >= 0] += excerpt.begin
            else:
                token_ids = tokenizer.finish(
                    excerpt.encoded, keep, params.truncation_side, add_special_tokens=adds_special_tokens
                )
            if is_instruction_cut:
                if params.truncation_side == "left":
                    of_text = encode_excerpt(tokenizer, text[len(before) :], keep, "left").tokens
                    instruction_tokens = _remaining_instruction(tokenizer, token_ids, special, of_text)
                instruction_tokens = min(instruction_tokens, len(token_ids))
            rendered = self.text_format.finish(token_ids, params.input_type)
            require_request(len(rendered.token_ids) > 0, "An input has no tokens.", field="prompts")
            if isinstance(prompt, ChunkedPrompt):
                chunks = tokens_of_chunks(
                    prompt.chunks, text, positions, begin=len(before), first_pooled=instruction_tokens
                )
                rendered = msgspec.structs.replace(rendered, chunks=chunks)
            return _with_instruction(rendered, instruction_tokens)

    def _count_instruction_tokens(self, tokenizer: Tokenizer, params: RenderingParams) -> int:
        """Return the number of the instruction's tokens; 0 if they are pooled."""
        if self.pools_instruction or not params.instruction:
            return 0
        return self._instruction_tokens(tokenizer, params.instruction, params.add_special_tokens)


def _with_instruction(rendered: RenderedPrompt, tokens: int) -> RenderedPrompt:
    return msgspec.structs.replace(rendered, instruction_tokens=tokens) if tokens else rendered


def _count_alone(tokenizer: Tokenizer, text: str, add_special_tokens: bool, most: int) -> int:  # noqa: FBT001
    """Count a text's tokens alone, without a trailing special token, as sentence-transformers does."""
    excerpt = encode_excerpt(tokenizer, text, most, "right")
    token_ids = tokenizer.finish(excerpt.encoded, most, "right", add_special_tokens=add_special_tokens)
    return len(token_ids) - (len(token_ids) > 0 and tokenizer.is_special(int(token_ids[-1])))


def _remaining_instruction(tokenizer: Tokenizer, token_ids: TokenIds, special: int, of_text: int) -> int:
    """Count the instruction's tokens that remain after truncation on the left, and the special ones before them.

    ``of_text`` is the number of tokens of the text after the instruction. 0 if no token of the instruction remains.
    """
    remaining = len(token_ids) - special - of_text
    if remaining <= 0:
        return 0
    return special - (special > 0 and tokenizer.is_special(int(token_ids[-1]))) + remaining


ALWAYS_READ = MARGIN_TOKENS * CHARACTERS_PER_TOKEN
"""Characters of a text that are tokenised even if hardly any of its tokens are kept."""

MAX_KNOWN_INSTRUCTIONS = 1024
"""Maximum entries of the cache of instruction lengths: clients can send instructions of their choice."""
