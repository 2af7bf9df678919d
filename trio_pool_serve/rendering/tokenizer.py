"""One tokenizer, for one thread at a time.

Both kinds split tokenising in two: ``encode`` without special tokens, then ``finish``, which cuts and
adds them. Truncation is a slice of our own, so that a fast tokenizer's truncation state is never
touched: changing it while another thread encodes is what raises "Already borrowed".
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import tokenizers
from attrs import Factory, define, field
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.model_folder.folder import ModelFolder
from trio_pool_serve.model_folder.late_interaction import LateInteraction
from trio_pool_serve.types import TokenIds, TruncationSide

Encoded: TypeAlias = Any
"""What ``encode`` made for ``finish``: it has a length, in tokens."""


class Tokenizer(Protocol):
    """Texts to token ids."""

    @property
    def special_tokens(self) -> int:
        """How many special tokens surround one text."""

    def encode(self, text: str) -> Encoded:
        """Tokenise without special tokens."""

    def finish(self, encoded: Encoded, keep: int, side: TruncationSide, *, add_special_tokens: bool) -> TokenIds:
        """Keep at most ``keep`` tokens, cutting at ``side``, and add the special tokens to them."""

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
    special_tokens: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        # tokenizer.json may carry truncation and padding settings of whoever saved it.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special_tokens = self._backend.num_special_tokens_to_add(is_pair=False)

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
        if len(encoded) > keep:
            encoded.truncate(keep, direction=side)
        if add_special_tokens:
            encoded = self._backend.post_process(encoded)
        return np.array(encoded.ids, dtype=np.int32)

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
        return FastTokenizer(copy.deepcopy(self._backend), self._special_ids, self._named_ids)


@define(eq=False)
class SlowTokenizer:
    """A tokenizer written in Python; its calls change its own state, so copies are deep."""

    _tokenizer: Any
    _lower_case: bool = False
    special_tokens: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.special_tokens = self._tokenizer.num_special_tokens_to_add(pair=False)

    def encode(self, text: str) -> Encoded:
        """Tokenise without special tokens."""
        if self._lower_case:
            text = text.lower()
        ids: Sequence[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def finish(self, encoded: Encoded, keep: int, side: TruncationSide, *, add_special_tokens: bool) -> TokenIds:
        """Cut and add special tokens."""
        ids = encoded[:keep] if side == "right" else encoded[max(0, len(encoded) - keep) :]
        if add_special_tokens:
            ids = self._tokenizer.build_inputs_with_special_tokens(ids)
        return np.array(ids, dtype=np.int32)

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
        return SlowTokenizer(copy.deepcopy(self._tokenizer), self._lower_case)


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
    if not loaded.is_fast:
        return SlowTokenizer(loaded, folder.lower_case)
    return FastTokenizer(copy.deepcopy(loaded.backend_tokenizer), frozenset(loaded.all_special_ids), _named_ids(loaded))


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
