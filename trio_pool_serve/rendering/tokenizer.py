"""One tokenizer, for one thread at a time.

Both kinds split tokenising in two: ``encode`` without special tokens, then ``finish``, which cuts and
adds them. Truncation is a slice of our own, so that a fast tokenizer's truncation state is never
touched: changing it while another thread encodes is what raises "Already borrowed".
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import tokenizers
from attrs import Factory, define, field
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.model_folder.folder import ModelFolder
from trio_pool_serve.model_folder.late_interaction import LateInteraction
from trio_pool_serve.rendering.token import Token
from trio_pool_serve.types import TokenIds, TruncationSide

Encoded: TypeAlias = Any
"""What ``encode`` made for ``finish``: it has a length, in tokens."""


RenderChat: TypeAlias = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], str]
"""(messages, options) → the text that the chat template makes of them; raises whatever the template does."""


class Tokenizer(Protocol):
    """Texts to token ids."""

    @property
    def special_tokens(self) -> int:
        """How many special tokens surround one text."""

    @property
    def pair_special_tokens(self) -> int:
        """How many special tokens surround two texts."""

    @property
    def render_chat(self) -> RenderChat | None:
        """The chat template, ``None`` if there is none."""

    def encode(self, text: str) -> Encoded:
        """Tokenise without special tokens."""

    def finish(self, encoded: Encoded, keep: int, side: TruncationSide, *, add_special_tokens: bool) -> TokenIds:
        """Keep at most ``keep`` tokens, cutting at ``side``, and add the special tokens to them."""

    def finish_windows(
        self, encoded: Encoded, size: int, *, prefix: Encoded, add_special_tokens: bool
    ) -> list[TokenIds]:
        """Take ``encoded`` apart into windows of ``size`` tokens; put ``prefix`` and special tokens around each."""

    def tokens(self, text: str, *, add_special_tokens: bool) -> list[Token]:
        """Return a text's tokens, for people to look at."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""

    def truncate(self, encoded: Encoded, keep: int, side: TruncationSide) -> Encoded:
        """Keep at most ``keep`` tokens, cutting at ``side``; ``encoded`` is used up."""

    def longest_first(self, first: int, second: int, keep: int) -> tuple[int, int]:
        """Return how many tokens of each text are kept when both may have ``keep`` together.

        A text that fills less than half stays whole, else each gets half. The odd token is the tokenizer's choice.
        """

    def join(self, first: Encoded, second: Encoded, *, add_special_tokens: bool) -> tuple[TokenIds, TokenIds | None]:
        """Join two texts; the second value is their segments, ``None`` where all are 0."""

    def beginning(self, text: str, encoded: Encoded, tokens: int) -> str:
        """Return the part of ``text`` that its first tokens come from; it has more than that many."""

    def is_special(self, token_id: int) -> bool:
        """Tell whether an id is one of the special tokens."""

    def id_of(self, token: str) -> int | None:
        """Return the id of a token, ``None`` if there is no such token."""

    def id_named(self, name: str) -> int | None:
        """Return the id of the special token of a name, such as ``mask_token``; ``None`` if there is none."""

    def copy(self) -> "Tokenizer":
        """Return one that shares no state with this."""


@define(eq=False)
class FastTokenizer:
    """A tokenizer of the ``tokenizers`` library."""

    _backend: tokenizers.Tokenizer
    _special_ids: frozenset[int]
    _named_ids: Mapping[str, int] = Factory(dict)
    _has_segments: bool = True
    render_chat: RenderChat | None = None
    special_tokens: int = field(init=False)
    pair_special_tokens: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        # tokenizer.json may carry truncation and padding settings of whoever saved it.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special_tokens = self._backend.num_special_tokens_to_add(is_pair=False)
        self.pair_special_tokens = self._backend.num_special_tokens_to_add(is_pair=True)

    def encode(self, text: str) -> Encoded:
        """Tokenise without special tokens.

        As a batch of one: ``encode_batch`` lets go of the interpreter lock, ``encode`` keeps it for as
        long as the text is. Raises ``UnicodeError`` for half of a surrogate pair, which JSON can carry.
        """
        try:
            return self._backend.encode_batch([text], add_special_tokens=False)[0]
        except TypeError as error:  # the only thing that can be wrong with a str, as the library puts it
            raise UnicodeError("the text holds a lone surrogate") from error

    def finish(self, encoded: Encoded, keep: int, side: TruncationSide, *, add_special_tokens: bool) -> TokenIds:
        """Cut and add special tokens."""
        encoded = self.truncate(encoded, keep, side)
        if add_special_tokens:
            encoded = self._backend.post_process(encoded)
        return np.array(encoded.ids, dtype=np.int32)

    def finish_windows(
        self, encoded: Encoded, size: int, *, prefix: Encoded, add_special_tokens: bool
    ) -> list[TokenIds]:
        """Cut and add a prefix and special tokens."""
        encoded.truncate(size, stride=0, direction="right")
        windows = [tokenizers.Encoding.merge([prefix, window]) for window in (encoded, *encoded.overflowing)]
        if add_special_tokens:
            windows = [self._backend.post_process(window) for window in windows]
        return [np.array(window.ids, dtype=np.int32) for window in windows]

    def tokens(self, text: str, *, add_special_tokens: bool) -> list[Token]:
        """Return a text's tokens."""
        encoded = self.encode(text)
        if add_special_tokens:
            encoded = self._backend.post_process(encoded)
        rows = zip(encoded.ids, encoded.tokens, encoded.special_tokens_mask, encoded.offsets, strict=True)
        return [
            Token(id_, piece, True, None, None, piece)  # noqa: FBT003  (a record of six)
            if special
            else Token(id_, text[start:stop], False, start, stop, piece)  # noqa: FBT003
            for id_, piece, special, (start, stop) in rows
        ]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def truncate(self, encoded: Encoded, keep: int, side: TruncationSide) -> Encoded:
        """Cut in place."""
        if len(encoded) > keep:
            encoded.truncate(keep, direction=side)
        return encoded

    def longest_first(self, first: int, second: int, keep: int) -> tuple[int, int]:
        """Give the odd token to the longer text, to the second if both are equally long."""
        return _shares(first, second, keep, odd_to_first=first > second)

    def join(self, first: Encoded, second: Encoded, *, add_special_tokens: bool) -> tuple[TokenIds, TokenIds | None]:
        """Join two texts as the library's post-processor does."""
        joined = self._backend.post_process(first, second, add_special_tokens=add_special_tokens)
        return np.array(joined.ids, dtype=np.int32), _segments(joined.type_ids) if self._has_segments else None

    def beginning(self, text: str, encoded: Encoded, tokens: int) -> str:
        """Cut behind the last character that the last of the tokens came from."""
        return text[: encoded.offsets[tokens - 1][1]]

    def is_special(self, token_id: int) -> bool:
        """Tell whether an id is one of the special tokens."""
        return token_id in self._special_ids

    def id_of(self, token: str) -> int | None:
        """Return the id of a token."""
        return self._backend.token_to_id(token)

    def id_named(self, name: str) -> int | None:
        """Return the id of the special token of a name."""
        return self._named_ids.get(name)

    def copy(self) -> "FastTokenizer":
        """Return a deep copy."""
        return FastTokenizer(
            copy.deepcopy(self._backend), self._special_ids, self._named_ids, self._has_segments, self.render_chat
        )


@define(eq=False)
class SlowTokenizer:
    """A tokenizer written in Python; its calls change its own state, so copies are deep."""

    _tokenizer: Any
    _lower_case: bool = False
    _has_segments: bool = True
    render_chat: RenderChat | None = None
    special_tokens: int = field(init=False)
    pair_special_tokens: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.special_tokens = self._tokenizer.num_special_tokens_to_add(pair=False)
        self.pair_special_tokens = self._tokenizer.num_special_tokens_to_add(pair=True)

    def encode(self, text: str) -> Encoded:
        """Tokenise without special tokens."""
        if self._lower_case:
            text = text.lower()
        ids: Sequence[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def finish(self, encoded: Encoded, keep: int, side: TruncationSide, *, add_special_tokens: bool) -> TokenIds:
        """Cut and add special tokens."""
        ids = self.truncate(encoded, keep, side)
        if add_special_tokens:
            ids = self._tokenizer.build_inputs_with_special_tokens(ids)
        return np.array(ids, dtype=np.int32)

    def finish_windows(
        self, encoded: Encoded, size: int, *, prefix: Encoded, add_special_tokens: bool
    ) -> list[TokenIds]:
        """Cut and add a prefix and special tokens."""
        windows = [[*prefix, *encoded[start : start + size]] for start in range(0, len(encoded), size)]
        return [self.finish(ids, len(ids), "right", add_special_tokens=add_special_tokens) for ids in windows]

    def tokens(self, text: str, *, add_special_tokens: bool) -> list[Token]:
        """Return a text's tokens; where they come from is not known."""
        encoded = self.encode(text)
        ids = self.finish(encoded, len(encoded), "right", add_special_tokens=add_special_tokens).tolist()
        pieces = self._tokenizer.convert_ids_to_tokens(ids)
        return [
            Token(id_, piece, self.is_special(id_), None, None, piece) for id_, piece in zip(ids, pieces, strict=True)
        ]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def truncate(self, encoded: Encoded, keep: int, side: TruncationSide) -> Encoded:
        """Cut."""
        return encoded[:keep] if side == "right" else encoded[max(0, len(encoded) - keep) :]

    def longest_first(self, first: int, second: int, keep: int) -> tuple[int, int]:
        """Give the odd token to the first text."""
        return _shares(first, second, keep, odd_to_first=True)

    def join(self, first: Encoded, second: Encoded, *, add_special_tokens: bool) -> tuple[TokenIds, TokenIds | None]:
        """Join two texts as the tokenizer's own methods do."""
        if add_special_tokens:
            ids = self._tokenizer.build_inputs_with_special_tokens(first, second)
            types = self._tokenizer.create_token_type_ids_from_sequences(first, second)
        else:
            ids, types = first + second, [0] * len(first) + [1] * len(second)
        return np.array(ids, dtype=np.int32), _segments(types) if self._has_segments else None

    def beginning(self, text: str, encoded: Encoded, tokens: int) -> str:
        """Put the tokens together again: these tokenizers do not say where in the text theirs were."""
        del text
        beginning: str = self._tokenizer.decode(encoded[:tokens])
        return beginning

    def is_special(self, token_id: int) -> bool:
        """Tell whether an id is one of the special tokens."""
        return token_id in self._tokenizer.all_special_ids

    def id_of(self, token: str) -> int | None:
        """Return the id of a token."""
        found: int | None = self._tokenizer.convert_tokens_to_ids(token)
        is_unknown = found == self._tokenizer.unk_token_id and token != self._tokenizer.unk_token
        return None if is_unknown else found

    def id_named(self, name: str) -> int | None:
        """Return the id of the special token of a name."""
        return _named_ids(self._tokenizer).get(name)

    def copy(self) -> "SlowTokenizer":
        """Return a deep copy."""
        return SlowTokenizer(copy.deepcopy(self._tokenizer), self._lower_case, self._has_segments, self.render_chat)


def _shares(first: int, second: int, keep: int, *, odd_to_first: bool) -> tuple[int, int]:
    if first + second <= keep:
        return first, second
    if 2 * min(first, second) <= keep:
        return (first, keep - first) if first <= second else (keep - second, second)
    of_first = (keep + odd_to_first) // 2
    return of_first, keep - of_first


def _segments(type_ids: Sequence[int]) -> TokenIds | None:
    return np.array(type_ids, dtype=np.int32) if any(type_ids) else None


def _chat_renderer(loaded: Any) -> RenderChat | None:
    if not loaded.chat_template:
        return None

    def render(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        rendered: str = loaded.apply_chat_template(messages, tokenize=False, **options)
        return rendered

    return render


def load_tokenizer(folder: ModelFolder, *, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of a model's folder. Blocks; raises ``ModelLoadError``."""
    # Imported here: it takes seconds, and brings torch along.
    from transformers import AutoTokenizer

    try:
        loaded: Any = AutoTokenizer.from_pretrained(
            folder.transformer_path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        raise ModelLoadError(f"The tokenizer of {folder.transformer_path} cannot be loaded: {error}") from error
    if loaded.is_fast and folder.lower_case:
        normalizer = loaded.backend_tokenizer.normalizer
        loaded.backend_tokenizer.normalizer = NormalizerSequence([Lowercase(), *([normalizer] if normalizer else [])])
    if isinstance(folder.architecture, LateInteraction):
        _keep_whole(loaded, folder.architecture.markers)
    has_segments, chat = "token_type_ids" in loaded.model_input_names, _chat_renderer(loaded)
    if not loaded.is_fast:
        return SlowTokenizer(loaded, folder.lower_case, has_segments, chat)
    backend = copy.deepcopy(loaded.backend_tokenizer)
    return FastTokenizer(backend, frozenset(loaded.all_special_ids), _named_ids(loaded), has_segments, chat)


def _named_ids(tokenizer: Any) -> dict[str, int]:
    return {name: tokenizer.convert_tokens_to_ids(str(token)) for name, token in tokenizer.special_tokens_map.items()}


def _keep_whole(tokenizer: Any, markers: Iterable[str]) -> None:
    """Make one token of each marker, or of its first word, if there is such a token; others stay ordinary text.

    ``[unused0]`` is in BERT's vocabulary, but as text it falls into ``[``, ``unused`` and so on.
    """
    vocabulary = tokenizer.get_vocab()
    split = []
    for marker in filter(str.strip, markers):
        known = next((text for text in (marker, marker.split()[0]) if text in vocabulary), None)
        if known is not None and tokenizer.tokenize(known) != [known]:
            split.append(tokenizers.AddedToken(known, normalized=False, special=True))
    tokenizer.add_tokens(split, special_tokens=True)
