"""``/tokenize`` and ``/detokenize`` of vLLM."""

from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from trio_pool_serve.api.fields.numbers import TokenId
from trio_pool_serve.api.http.endpoint import Call, Endpoint
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.tasks.tokenize import detokenize, tokenize


@frozen(kw_only=True)
class TokenizeRequest:
    """The body of ``/tokenize``. Every optional field may be null."""

    prompt: str | None = None
    messages: Any = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def job(self, network: NetworkConfig) -> str:
        """Return the text to be tokenized. Raises ``InvalidRequestError``."""
        del network  # bounds numbers of inputs; this is one
        if self.prompt is not None:
            return self.prompt
        if self.messages is not None:
            raise InvalidRequestError("messages cannot be tokenized here; send a prompt.", param="messages")
        raise InvalidRequestError("prompt is missing.", param="prompt")


@frozen(kw_only=True)
class TokenizeResponse:
    """The response of ``/tokenize``; ``token_strs`` are the vocabulary's entries."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


async def respond_tokenize(call: Call[TokenizeRequest, str]) -> HttpResponse:
    """Tokenize. Raises what ``tokenize`` raises. Cancellation: at once."""
    special = call.wire.add_special_tokens is not False
    (tokens,) = await tokenize(call.model, [call.job], add_special_tokens=special)

    def encode() -> HttpResponse:
        response = TokenizeResponse(
            count=len(tokens),
            max_model_len=call.model.renderer.max_model_len,
            tokens=[token.id for token in tokens],
            token_strs=[token.piece for token in tokens] if call.wire.return_token_strs else None,
        )
        return HttpResponse.json(response)

    return await call.encode(encode, rows=len(tokens), nbytes=len(call.job))


@frozen(kw_only=True)
class DetokenizeRequest:
    """The body of ``/detokenize``, and of Cohere's ``/v1/detokenize``. Every optional field may be null."""

    tokens: list[TokenId]
    model: str | None = None

    def job(self, network: NetworkConfig) -> npt.NDArray[np.int64]:
        """Return the token ids."""
        del network  # bounds numbers of inputs; this is one
        return np.array(self.tokens, dtype=np.int64)


@frozen(kw_only=True)
class DetokenizeResponse:
    """The response of ``/detokenize``."""

    prompt: str


async def respond_detokenize(call: Call[DetokenizeRequest, npt.NDArray[np.int64]]) -> HttpResponse:
    """Detokenize, special tokens too. Raises what ``detokenize`` raises. Cancellation: at once."""
    (text,) = await detokenize(call.model, [call.job], skip_special_tokens=False)
    return await call.encode(lambda: HttpResponse.json(DetokenizeResponse(prompt=text)), rows=1, nbytes=len(text))


TOKENIZE: Endpoint[TokenizeRequest, str] = Endpoint(
    paths=("/tokenize",),
    wire=TokenizeRequest,
    respond=respond_tokenize,
    field_names={"prompts": "prompt"},
    response=TokenizeResponse,
    summary="Show the tokens that the model would read.",
    example={"prompt": "A nursery owns its tasks.", "return_token_strs": True},
)

DETOKENIZE: Endpoint[DetokenizeRequest, npt.NDArray[np.int64]] = Endpoint(
    paths=("/detokenize",),
    wire=DetokenizeRequest,
    respond=respond_detokenize,
    field_names={"token_ids": "tokens"},
    response=DetokenizeResponse,
    summary="Turn tokens back into text.",
    example={"tokens": [5, 6, 7]},
)
