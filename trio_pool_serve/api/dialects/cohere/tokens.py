"""Cohere's ``/v1/tokenize`` and ``/v1/detokenize``."""

import msgspec
import numpy as np
import numpy.typing as npt
from attrs import frozen

from trio_pool_serve.api.dialects.cohere.wire import Meta, meta_of
from trio_pool_serve.api.fields.numbers import TokenId
from trio_pool_serve.api.http.answer import Answer
from trio_pool_serve.api.http.endpoint import Call, Endpoint
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.tasks.tokenize import detokenize, tokenize


@frozen(kw_only=True)
class TokenizeRequest:
    """The body of ``/v1/tokenize``."""

    text: str
    model: str | None = None

    def job(self, network: NetworkConfig) -> str:
        """Return the text."""
        del network
        return self.text


@frozen(kw_only=True)
class TokenizeResponse:
    """A text's tokens, without special ones."""

    tokens: list[int]
    token_strings: list[str]
    meta: Meta


@frozen(kw_only=True)
class DetokenizeRequest:
    """The body of ``/v1/detokenize``."""

    tokens: list[TokenId]
    model: str | None = None

    def job(self, network: NetworkConfig) -> npt.NDArray[np.int64]:
        """Return the token ids."""
        del network
        return np.array(self.tokens, dtype=np.int64)


@frozen(kw_only=True)
class DetokenizeResponse:
    """The text of tokens."""

    text: str
    meta: Meta


async def answer_tokenize(call: Call[TokenizeRequest, str]) -> Answer:
    """Tokenise. Raises what ``tokenize`` raises. Cancellation: at once."""
    (tokens,) = await tokenize(call.model, [call.job], add_special_tokens=False)

    def encode() -> Answer:
        ids, strings = [token.id for token in tokens], [token.text for token in tokens]
        return Answer(msgspec.json.encode(TokenizeResponse(tokens=ids, token_strings=strings, meta=meta_of("1"))))

    return await call.encode(encode, rows=1, nbytes=8 * len(tokens))


async def answer_detokenize(call: Call[DetokenizeRequest, npt.NDArray[np.int64]]) -> Answer:
    """Put tokens together. Raises what ``detokenize`` raises. Cancellation: at once."""
    (text,) = await detokenize(call.model, [call.job], skip_special_tokens=False)
    response = DetokenizeResponse(text=text, meta=meta_of("1"))
    return await call.encode(lambda: Answer(msgspec.json.encode(response)), rows=1, nbytes=len(text))


TOKEN_ENDPOINTS = (
    Endpoint(
        paths=("/v1/tokenize",),
        marks=frozenset({"text"}),
        wire=TokenizeRequest,
        read=TokenizeRequest.job,
        answer=answer_tokenize,
        response=TokenizeResponse,
        summary="Take a text apart into tokens.",
        example={"text": "A nursery owns its tasks."},
    ),
    Endpoint(
        paths=("/v1/detokenize",),
        marks=frozenset({"tokens"}),
        wire=DetokenizeRequest,
        read=DetokenizeRequest.job,
        answer=answer_detokenize,
        response=DetokenizeResponse,
        summary="Put tokens together to a text.",
        example={"tokens": [5, 6, 7]},
    ),
)
