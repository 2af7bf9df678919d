"""``/v1/tokenize`` and ``/v1/detokenize``."""

from functools import partial

from attrs import frozen

from trio_pool_serve.api.dialects.vllm.token_endpoints import DetokenizeRequest, respond_detokenize
from trio_pool_serve.api.fields.ranking import Meta, meta_of
from trio_pool_serve.api.http.endpoint import Call, Endpoint
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.tasks.tokenize import tokenize


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
class DetokenizeResponse:
    """The text of token ids."""

    text: str
    meta: Meta


async def respond_tokenize(call: Call[TokenizeRequest, str]) -> HttpResponse:
    """Tokenize. Raises what ``tokenize`` raises. Cancellation: at once."""
    (tokens,) = await tokenize(call.model, [call.job], call.context, add_special_tokens=False)

    def encode() -> HttpResponse:
        ids, strings = [token.id for token in tokens], [token.text for token in tokens]
        return HttpResponse.json(TokenizeResponse(tokens=ids, token_strings=strings, meta=meta_of("1")))

    return await call.encode(encode, rows=1, nbytes=8 * len(tokens))


TOKEN_ENDPOINTS = (
    Endpoint(
        paths=("/v1/tokenize",),
        discriminators=frozenset({"text"}),
        wire=TokenizeRequest,
        respond=respond_tokenize,
        field_names={"prompts": "text"},
        response=TokenizeResponse,
        summary="Tokenize a text.",
        example={"text": "A nursery owns its tasks."},
    ),
    Endpoint(
        paths=("/v1/detokenize",),
        discriminators=frozenset({"tokens"}),
        wire=DetokenizeRequest,
        respond=partial(respond_detokenize, response=lambda text: DetokenizeResponse(text=text, meta=meta_of("1"))),
        field_names={"token_ids": "tokens"},
        response=DetokenizeResponse,
        summary="Turn tokens back into text.",
        example={"tokens": [5, 6, 7]},
    ),
)
