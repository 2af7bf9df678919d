"""Inputs as clients send them, to prompts and limits on them."""

from collections.abc import Sequence

import numpy as np

from trio_pool_serve.api.payloads import Payloads
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import EmptyInputError, InvalidRequestError
from trio_pool_serve.types import Prompt, TextPrompt, TokensPrompt

Input = str | list[str | int | list[int]]
"""A text, texts, token ids, lists of token ids."""


def prompts_of(asked: Input, network: NetworkConfig, *, param: str = "input") -> list[Prompt]:
    """Tell apart the four forms of an input. Raises ``InvalidRequestError``, which blames ``param``."""
    if isinstance(asked, str):
        return [TextPrompt(asked)]
    if not asked:
        raise EmptyInputError(f"{param} is empty.", param=param)
    kinds = set(map(type, asked))
    if len(kinds) > 1:
        raise InvalidRequestError(f"{param} mixes texts and token ids.", param=param)
    (kind,) = kinds
    if kind is int:
        return [_tokens_prompt(asked, param)]  # type: ignore[arg-type]
    require_few(asked, network, param=param)
    if kind is str:
        return [TextPrompt(text) for text in asked]  # type: ignore[arg-type]
    return [_tokens_prompt(ids, param) for ids in asked]  # type: ignore[arg-type]


def asked_prompts(asked: Input | None, prompt_embeds: Payloads | None, network: NetworkConfig) -> list[Prompt]:
    """Return the prompts of a request that has texts or token ids, or embeddings in their place.

    Raises ``InvalidRequestError`` unless it has exactly one of them.
    """
    if asked is not None and prompt_embeds is not None:
        raise InvalidRequestError("Give input or prompt_embeds, not both.", param="prompt_embeds")
    if prompt_embeds is None:
        if asked is None:
            raise InvalidRequestError("The body needs the field input.", param="input")
        return prompts_of(asked, network)
    require_few(prompt_embeds.items, network, param="prompt_embeds")
    return [*prompt_embeds.prompts()]


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
