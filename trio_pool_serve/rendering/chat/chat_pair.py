"""The pair format of language models: a conversation of a query and a document in a chat template."""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
from attrs import Factory, define, field, frozen

from trio_pool_serve.errors import InvalidRequestError, require
from trio_pool_serve.prompts import PairPrompt, RenderingParams
from trio_pool_serve.rendering.text.excerpt import shorten
from trio_pool_serve.rendering.text.long_text import encode_input
from trio_pool_serve.rendering.text.pair_format import PairFormat
from trio_pool_serve.rendering.text.tokenizer import Tokenizer, all_ids
from trio_pool_serve.types import RenderedPrompt, TokenIds

STRUCTURED_PATTERNS = ("content[0]", ".type", "'type'", '"type"', "item.type", "message.content[")
"""sentence-transformers' patterns for templates that expect a message's content as a list of parts."""


@frozen(kw_only=True)
class ChatFormat:
    """How a pair is passed to a chat template: as a message of role ``query`` and one of role ``document``.

    As in sentence-transformers, the instruction is a system message before them.

    ``structured`` passes a message's content as a list of parts. ``options`` are the template kwargs. ``required`` is
    true if the model's files declare this format; else it is used only if the template renders both texts. With
    ``instruction_is_variable`` the template has a variable ``instruction``, as vLLM's templates for rerankers do, in
    place of a system message.
    """

    structured: bool
    options: Mapping[str, Any]
    required: bool = True
    instruction_is_variable: bool = False

    def messages(self, first: str, second: str, instruction: str) -> list[dict[str, Any]]:
        """Return a pair as a conversation."""
        texts = [("query", first), ("document", second)]
        if instruction and not self.instruction_is_variable:
            texts.insert(0, ("system", instruction))
        return [
            {"role": role, "content": [{"type": "text", "text": text}] if self.structured else text}
            for role, text in texts
        ]

    def variables(self, instruction: str) -> Mapping[str, Any]:
        """Return the template kwargs of a pair."""
        if instruction and self.instruction_is_variable:
            return {**self.options, "instruction": instruction}
        return self.options


def expects_content_parts(template: str) -> bool:
    """Whether a template looks as if it expects a message's content as a list of parts."""
    return any(pattern in template for pattern in STRUCTURED_PATTERNS)


MAX_KNOWN_SUFFIXES = 1024
"""Maximum entries of the cache of template suffixes by instruction: clients can send instructions of their choice."""


@define(eq=False)
class ChatPair(PairFormat):
    """Renders a pair as a conversation of a query and a document.

    Truncation keeps the template's text after both, where the model answers.
    """

    _format: ChatFormat
    _suffix_of: Callable[[Tokenizer, str], TokenIds] = field(
        init=False,
        default=Factory(
            lambda self: lru_cache(MAX_KNOWN_SUFFIXES)(partial(_common_suffix, self._format)), takes_self=True
        ),
    )
    """Returns the text after both, for an instruction, and remembers it."""

    def render(
        self, tokenizer: Tokenizer, prompt: PairPrompt, params: RenderingParams, max_model_len: int
    ) -> RenderedPrompt:
        """Return the token ids of the conversation; special tokens come from the template."""
        text = _text_of(self._format, tokenizer, *shortened_pair(tokenizer, prompt), params.instruction)
        excerpt, keep = encode_input(tokenizer, text, params, max_model_len, taken=0)
        is_cut = not excerpt.fits(keep)  # read before the tokens are truncated in place
        ids = tokenizer.finish(excerpt.encoded, keep, params.truncation_side, add_special_tokens=False)
        if is_cut:
            suffix = self._suffix_of(tokenizer, params.instruction)[-len(ids) :]
            ids = np.concatenate([ids[: len(ids) - len(suffix)], suffix])
        return RenderedPrompt(ids)


def _text_of(template: ChatFormat, tokenizer: Tokenizer, first: str, second: str, instruction: str) -> str:
    try:
        return tokenizer.chat.render(template.messages(first, second, instruction), template.variables(instruction))
    except UnicodeError:
        raise
    except Exception as error:
        raise InvalidRequestError(f"The model's chat template refuses an input: {error}", field="prompts") from error


def _common_suffix(template: ChatFormat, tokenizer: Tokenizer, instruction: str) -> TokenIds:
    """Return the common suffix of two conversations that differ in everything but the instruction."""
    texts = (_text_of(template, tokenizer, filler, filler, instruction) for filler in ("0", "1 2 3 4"))
    one, other = (all_ids(tokenizer, tokenizer.encode(text)) for text in texts)
    shorter = min(len(one), len(other))
    differ = np.flatnonzero(one[::-1][:shorter] != other[::-1][:shorter])
    return one[len(one) - int(differ[0]) :] if len(differ) else one[:0]


def chat_pair(template: ChatFormat | None, tokenizer: Tokenizer) -> PairFormat:
    """Return the pair format of a model: its chat template if that renders both texts, else a joined pair.

    Raises ``ModelLoadError`` if the files require a template that cannot be used.
    """
    if template is None:
        return PairFormat()
    fault = _fault(template, tokenizer)
    if fault is None:
        return ChatPair(template)
    require(not template.required, f"The chat template cannot carry a query and a document: {fault}.")
    return PairFormat()


def _fault(template: ChatFormat, tokenizer: Tokenizer) -> str | None:
    """Return why a template does not render both texts, if so: its output must change with each."""
    if not tokenizer.chat.templates:
        return "there is none"
    try:
        texts = [
            tokenizer.chat.render(template.messages(first, second, ""), template.options)
            for first, second in (("alpha", "bravo"), ("charlie", "bravo"), ("alpha", "foxtrot"))
        ]
    except Exception as error:
        return f"it fails with {error}"
    lost = [role for role, text in zip(("query", "document"), texts[1:], strict=True) if text == texts[0]]
    return f"it leaves out the {' and the '.join(lost)}" if lost else None


def shortened_pair(tokenizer: Tokenizer, prompt: PairPrompt) -> tuple[str, str]:
    """Return both texts of a pair, each truncated to its limit."""
    return (
        shorten(tokenizer, prompt.first, prompt.max_first_tokens),
        shorten(tokenizer, prompt.second, prompt.max_second_tokens),
    )
