"""``/tokenize`` and ``/decode``."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from attrs import frozen

from trio_pool_serve.api.dialects.tei.pooling_endpoints import TEXTS, none_empty, respond_timed
from trio_pool_serve.api.fields.encodings import array_json
from trio_pool_serve.api.fields.field_values import TokenId, WireRequest, require_few
from trio_pool_serve.api.fields.input_fields import prompts_of
from trio_pool_serve.api.http.endpoint import Call, Endpoint
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.prompts import TextPrompt, TokensPrompt
from trio_pool_serve.rendering.text.tokenizer import Token
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.tokenize import detokenize, tokenize


@frozen(kw_only=True)
class TokenizeRequest(WireRequest):
    """The body of ``/tokenize``."""

    inputs: str | list[str]
    add_special_tokens: bool | None = None
    prompt_name: str | None = None

    def job(self, max_inputs: int) -> list[str]:
        """Return the texts. Raises ``InvalidRequestError``."""
        texts = [self.inputs] if isinstance(self.inputs, str) else self.inputs
        none_empty(list(map(TextPrompt, texts)))
        require_few(len(texts), max_inputs, param="inputs")
        return texts


async def respond_tokenize(call: Call[TokenizeRequest, list[str]]) -> HttpResponse:
    """Respond to ``/tokenize``: the tokens of each text.

    Errors: as ``tokenize``. Cancellation: as ``tokenize``.
    """
    instruction = call.model.rendering_params(InputParams(prompt_name=call.wire.prompt_name)).instruction
    tokens = await tokenize(
        call.model,
        call.job,
        call.context,
        add_special_tokens=call.wire.add_special_tokens is not False,
        instruction=instruction,
    )

    def encode() -> HttpResponse:
        simple = (_simple_tokens(instruction + text, of) for text, of in zip(call.job, tokens, strict=True))
        return HttpResponse(array_json(list(map(msgspec.json.encode, simple))))

    count, characters = sum(map(len, tokens)), sum(map(len, call.job))
    return await respond_timed(call, encode, rows=count, nbytes=characters, tokens=count, characters=characters)


def _simple_tokens(text: str, tokens: Sequence[Token]) -> list[dict[str, object]]:
    """Return the tokens of a text as ``/tokenize`` shows them; ``start`` and ``stop`` count bytes of UTF-8."""
    at = [0, *accumulate(len(character.encode()) for character in text)]
    return [
        {
            "id": token.id,
            "text": token.text,
            "special": token.special,
            "start": None if token.start is None else at[token.start],
            "stop": None if token.stop is None else at[token.stop],
        }
        for token in tokens
    ]


@frozen(kw_only=True)
class DecodeRequest(WireRequest):
    """The body of ``/decode``."""

    ids: list[TokenId | list[TokenId]]
    skip_special_tokens: bool | None = None

    def job(self, max_inputs: int) -> list[npt.NDArray[np.int64]]:
        """Return the lists of token ids, each of shape (tokens,). Raises ``InvalidRequestError``."""
        return [
            prompt.token_ids
            for prompt in prompts_of(self.ids, max_inputs, param="ids")  # type: ignore[arg-type]
            if isinstance(prompt, TokensPrompt)
        ]


async def respond_decode(call: Call[DecodeRequest, list[npt.NDArray[np.int64]]]) -> HttpResponse:
    """Respond to ``/decode``: the text of each list of ids.

    Errors: as ``detokenize``. Cancellation: as ``detokenize``.
    """
    skips = call.wire.skip_special_tokens is not False
    texts = await detokenize(call.model, call.job, call.context, skip_special_tokens=skips)
    return await respond_timed(
        call,
        lambda: HttpResponse.json(texts),
        rows=len(texts),
        nbytes=sum(map(len, texts)),
        tokens=sum(map(len, call.job)),
        characters=None,
    )


TOKEN_ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (
    Endpoint(
        paths=("/tokenize",),
        discriminators=frozenset({"inputs"}),
        wire=TokenizeRequest,
        respond=respond_tokenize,
        field_names={"prompts": "inputs"},
        summary="Tokenize texts.",
        example={"inputs": TEXTS},
    ),
    Endpoint(
        paths=("/decode",),
        wire=DecodeRequest,
        respond=respond_decode,
        field_names={"token_ids": "ids"},
        summary="Turn tokens back into texts.",
        example={"ids": [[5, 6], [7]]},
    ),
)
