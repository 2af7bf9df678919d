"""Inputs as clients send them, to prompts and limits on them."""

from collections.abc import Sequence

import numpy as np

from trio_pool_serve.api.image_inputs import InputObject
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import EmptyInputError, InvalidRequestError
from trio_pool_serve.types import Prompt, TextPrompt, TokensPrompt

Input = str | list[str | int | list[int]]
"""A text, texts, token ids, lists of token ids."""

AnyInput = str | InputObject | list[str | int | list[int] | InputObject]
"""Also texts and images that say what they are, among texts that do not."""


def prompts_of(asked: Input | AnyInput, network: NetworkConfig, *, param: str = "input") -> list[Prompt]:
    """Tell apart the forms of an input. Raises ``InvalidRequestError``, which blames ``param``."""
    if isinstance(asked, str):
        return [TextPrompt(asked)]
    if isinstance(asked, InputObject):
        return [asked.prompt(param=param)]
    if not asked:
        raise EmptyInputError(f"{param} is empty.", param=param)
    kinds = set(map(type, asked))
    if kinds == {str, InputObject} or kinds == {InputObject}:
        require_few(asked, network, param=param)
        return [TextPrompt(item) if isinstance(item, str) else item.prompt(param=param) for item in asked]  # type: ignore[union-attr]
    if len(kinds) > 1:
        raise InvalidRequestError(f"{param} mixes token ids and other inputs.", param=param)
    (kind,) = kinds
    if kind is int:
        return [_tokens_prompt(asked, param)]  # type: ignore[arg-type]
    require_few(asked, network, param=param)
    if kind is str:
        return [TextPrompt(text) for text in asked]  # type: ignore[arg-type]
    return [_tokens_prompt(ids, param) for ids in asked]  # type: ignore[arg-type]


def require_few(inputs: Sequence[object], network: NetworkConfig, *, param: str) -> None:
    """Raise ``InvalidRequestError`` for more inputs than ``--max-inputs-per-request``."""
    if len(inputs) > network.max_inputs_per_request:
        raise InvalidRequestError(f"{len(inputs)} inputs are more than {network.max_inputs_per_request}.", param=param)


def _tokens_prompt(ids: list[int], param: str) -> TokensPrompt:
    if not ids:
        raise EmptyInputError("An input has no tokens.", param=param)
    try:
        return TokensPrompt(np.array(ids, dtype=np.int64))
    except OverflowError as error:
        raise InvalidRequestError("A token id is too large to be one.", param=param) from error
