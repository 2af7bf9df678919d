"""Tokenizers written in Python, which few models still use."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import define, evolve

from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.prompts import TruncationSide
from trio_pool_serve.rendering.text.tokenizer import Encoded, Positions, Token, Tokenizer
from trio_pool_serve.types import TokenIds


@define(eq=False)
class SlowTokenizer(Tokenizer):
    """A tokenizer written in Python. Its calls change its state, so copies are deep."""

    _tokenizer: Any
    _lower_case: bool = False
    odd_to_first = True

    def __attrs_post_init__(self) -> None:
        self.special_tokens = self._tokenizer.num_special_tokens_to_add(pair=False)
        self.pair_special_tokens = self._tokenizer.num_special_tokens_to_add(pair=True)

    def encode(self, text: str, *, positions: bool = False) -> Encoded:  # noqa: ARG002
        """Tokenise without special tokens; there are no positions."""
        return self._tokenizer.encode(
            text.lower() if self._lower_case else text, add_special_tokens=False, verbose=False
        )

    def finish(self, encoded: Encoded, keep: int, side: TruncationSide, *, add_special_tokens: bool) -> TokenIds:
        """Truncate and add special tokens."""
        ids = self.truncate(encoded, keep, side)
        framed = self._tokenizer.build_inputs_with_special_tokens(ids) if add_special_tokens else ids
        return np.array(framed, dtype=np.int32)

    def finish_with_positions(self, *_: object, **__: object) -> tuple[TokenIds, Positions]:
        """Raise ``InvalidRequestError``: these tokenizers provide no positions."""
        raise InvalidRequestError(
            "Late chunking needs the positions of tokens in the text; this model's tokenizer does not return them.",
            field="chunks",
        )

    def finish_windows(
        self, encoded: Encoded, size: int, *, prefix: Encoded, add_special_tokens: bool
    ) -> list[TokenIds]:
        """Split into windows and add a prefix and special tokens to each."""
        windows = [[*prefix, *encoded[start : start + size]] for start in range(0, len(encoded), size)]
        return [self.finish(ids, len(ids), "right", add_special_tokens=add_special_tokens) for ids in windows]

    def tokens(self, text: str, *, add_special_tokens: bool) -> list[Token]:
        """Return the tokens of a text, without positions, which these tokenizers do not provide."""
        encoded = self.encode(text)
        ids = self.finish(encoded, len(encoded), "right", add_special_tokens=add_special_tokens).tolist()
        return [
            Token(id_, piece, self.is_special(id_), None, None, piece)
            for id_, piece in zip(ids, self._tokenizer.convert_ids_to_tokens(ids), strict=True)
        ]

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's entries."""
        return list(self._tokenizer.convert_ids_to_tokens(list(token_ids)))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def truncate(self, encoded: Encoded, keep: int, side: TruncationSide) -> Encoded:
        """Truncate."""
        return encoded[:keep] if side == "right" else encoded[max(0, len(encoded) - keep) :]

    def join(self, first: Encoded, second: Encoded, *, add_special_tokens: bool) -> tuple[TokenIds, TokenIds | None]:
        """Join two texts by the tokenizer's methods."""
        if add_special_tokens:
            ids = self._tokenizer.build_inputs_with_special_tokens(first, second)
            types = self._tokenizer.create_token_type_ids_from_sequences(first, second)
        else:
            ids, types = first + second, [0] * len(first) + [1] * len(second)
        return self._pair(ids, types)

    def beginning(self, text: str, encoded: Encoded, tokens: int) -> str:  # noqa: ARG002
        """Decode the first tokens, because these tokenizers provide no positions."""
        return str(self._tokenizer.decode(encoded[:tokens]))

    def is_special(self, token_id: int) -> bool:
        """Whether an id is one of the special tokens."""
        return token_id in self._tokenizer.all_special_ids

    def id_of(self, token: str) -> int | None:
        """Return the id of a token."""
        found: int | None = self._tokenizer.convert_tokens_to_ids(token)
        return None if found == self._tokenizer.unk_token_id and token != self._tokenizer.unk_token else found

    def id_named(self, name: str) -> int | None:
        """Return the id of the special token of a name."""
        return named_ids(self._tokenizer).get(name)

    def copy(self) -> "SlowTokenizer":
        """Return a deep copy."""
        return evolve(self, tokenizer=copy.deepcopy(self._tokenizer))


def named_ids(tokenizer: Any) -> dict[str, int]:
    """Return a transformers tokenizer's special token ids by name, such as ``mask_token``."""
    ids = {name: tokenizer.convert_tokens_to_ids(str(token)) for name, token in tokenizer.special_tokens_map.items()}
    return {name: token_id for name, token_id in ids.items() if token_id is not None}
