"""The tokenizer interface. A tokenizer is used by one thread at a time.

Fast and slow tokenizers tokenise in two steps: ``encode`` without special tokens, then ``finish``, which truncates and
adds them. Truncation never changes a fast tokenizer's truncation state: changing it while another thread encodes
raises "Already borrowed".
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import Factory, define, field, frozen

from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.prompts import TruncationSide
from trio_pool_serve.rendering.chat.template_sandbox import render_conversation
from trio_pool_serve.types import TokenIds


@frozen
class Token:
    """A token and its position.

    ``text`` is the text it covers, ``piece`` its entry in the vocabulary. ``start`` and ``stop`` are character
    positions, ``None`` for special tokens and for tokenizers without positions.
    """

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None
    piece: str


Positions: TypeAlias = npt.NDArray[np.int64]
"""The first character of each token and the one after its last, shape (tokens, 2); −1 for special tokens."""

Encoded: TypeAlias = Any
"""Result of ``encode``, input of ``finish``; its length is in tokens."""


@frozen(kw_only=True)
class ModelChatTemplates:
    """The chat templates of a model's files.

    ``templates`` are Jinja sources by name, for most models one named ``default``; empty for models without
    conversations. ``special_tokens`` are the template variables of special tokens, by name, such as ``bos_token``.
    """

    templates: Mapping[str, str] = Factory(dict)
    special_tokens: Mapping[str, str] = Factory(dict)

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Return the text of a conversation, rendered in this process. Raises any exception that the template raises.

        The option ``chat_template`` is the name of one of the templates, or another one.
        """
        variables = {**self.special_tokens, **options}
        named = variables.pop("chat_template", "default")
        flags = {name: bool(variables.pop(name, False)) for name in ("add_generation_prompt", "continue_final_message")}
        return render_conversation(self.templates.get(named, named), messages, variables, **flags)


@define(eq=False, kw_only=True)
class Tokenizer(ABC):
    """Converts texts to token ids and back."""

    chat: ModelChatTemplates = Factory(ModelChatTemplates)
    """The chat templates of the model's files."""
    truncation_side: TruncationSide = "right"
    """Where texts are truncated unless a request says otherwise."""
    routes: "Sequence[Tokenizer]" = ()
    """The tokenizers of a model with several routes, by the route's number; empty for other models."""
    _has_segments: bool = True
    """Whether the model tells the two texts of a pair apart."""
    special_tokens: int = field(init=False)
    """Number of special tokens around one text."""
    pair_special_tokens: int = field(init=False)
    """Number of special tokens around a pair."""
    has_short_ids: bool = field(default=False, init=False)
    """Whether ``short_ids`` returns anything."""
    odd_to_first: ClassVar[bool] = False
    """Whether the first of two texts that are truncated gets the odd token, even if it is not the longer one."""

    @abstractmethod
    def encode(self, text: str, *, positions: bool = False) -> Encoded:
        """Tokenise without special tokens; with ``positions`` for ``finish_with_positions`` and ``beginning``."""

    def encode_all(self, texts: Sequence[str]) -> Sequence[Encoded]:
        """Tokenise several texts as ``encode``, which fails for all if it fails for one."""
        return list(map(self.encode, texts))

    def short_ids(self, text: str, *, add_special_tokens: bool) -> TokenIds | None:  # noqa: ARG002
        """Return all token ids of a short text, if there is a faster way than ``encode`` and ``finish``."""
        return None

    @abstractmethod
    def finish(self, encoded: Encoded, keep: int, side: TruncationSide, *, add_special_tokens: bool) -> TokenIds:
        """Return at most ``keep`` token ids, truncated at ``side``, with special tokens added."""

    @abstractmethod
    def finish_with_positions(
        self, encoded: Encoded, keep: int, side: TruncationSide, *, add_special_tokens: bool
    ) -> tuple[TokenIds, Positions]:
        """Return the result of ``finish``, and where each token begins and ends in the encoded text.

        Raises ``InvalidRequestError`` if the tokenizer does not know.
        """

    @abstractmethod
    def finish_windows(
        self, encoded: Encoded, size: int, *, prefix: Encoded, add_special_tokens: bool
    ) -> list[TokenIds]:
        """Return windows of ``size`` tokens, with ``prefix`` and special tokens added to each."""

    @abstractmethod
    def tokens(self, text: str, *, add_special_tokens: bool) -> list[Token]:
        """Return all tokens of a text, for display."""

    @abstractmethod
    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's entry of each id, which must be in the vocabulary."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""

    @abstractmethod
    def truncate(self, encoded: Encoded, keep: int, side: TruncationSide) -> Encoded:
        """Return at most ``keep`` tokens, truncated at ``side``; ``encoded`` must not be used afterwards."""

    @abstractmethod
    def join(self, first: Encoded, second: Encoded, *, add_special_tokens: bool) -> tuple[TokenIds, TokenIds | None]:
        """Return the token ids of two texts, and their segments (int32, shape (tokens,)), ``None`` if all are 0."""

    @abstractmethod
    def beginning(self, text: str, encoded: Encoded, tokens: int) -> str:
        """Return the part of ``text`` covered by its first ``tokens`` tokens, of which it has more."""

    @abstractmethod
    def is_special(self, token_id: int) -> bool:
        """Whether an id is one of the special tokens."""

    @abstractmethod
    def id_of(self, token: str) -> int | None:
        """Return the id of a token, ``None`` if the vocabulary lacks it."""

    @abstractmethod
    def id_named(self, name: str) -> int | None:
        """Return the id of a special token by its name, such as ``mask_token``; ``None`` if there is none."""

    def copy(self) -> "Tokenizer":
        """Return a tokenizer that another thread can use at the same time: itself, unless its calls change it."""
        return self

    def _pair(self, token_ids: Sequence[int], type_ids: Sequence[int]) -> tuple[TokenIds, TokenIds | None]:
        segments = np.array(type_ids, dtype=np.int32) if self._has_segments and any(type_ids) else None
        return np.array(token_ids, dtype=np.int32), segments


def all_ids(tokenizer: Tokenizer, encoded: Encoded) -> TokenIds:
    """Return all token ids of a text that is tokenised, without special tokens."""
    return tokenizer.finish(encoded, len(encoded), "right", add_special_tokens=False)


@define(eq=False)
class TokenizerPool:
    """Copies of one tokenizer, each lent to one thread at a time; a fast one is the same in all threads.

    There are at least as many copies as threads that render, so one is always free. Not ``threading.local``, because
    trio's threads start and end.
    """

    first: Tokenizer
    size: int
    _free: deque[Tokenizer] = field(
        init=False,
        default=Factory(
            lambda self: deque([self.first, *(self.first.copy() for _ in range(self.size - 1))]), takes_self=True
        ),
    )

    @contextmanager
    def lend(self) -> Iterator[Tokenizer]:
        """Lend a tokenizer to any thread: deque's pop and append are atomic.

        Raises ``InvalidRequestError`` instead of a ``UnicodeError`` of the block.
        """
        tokenizer = self._free.pop()
        try:
            yield tokenizer
        except UnicodeError as error:
            raise InvalidRequestError(
                "An input contains a lone surrogate, which is not valid Unicode.", field="prompts"
            ) from error
        finally:
            self._free.append(tokenizer)

    def __repr__(self) -> str:
        return f"<TokenizerPool {len(self._free)} of {self.size} free>"
