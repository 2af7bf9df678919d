"""``/tokenize`` and ``/detokenize``."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

from trio_pool_serve.api.fields.field_values import TokenId, WireRequest, refuse_given
from trio_pool_serve.api.fields.input_fields import the_one_given
from trio_pool_serve.api.fields.messages import ConversationFields
from trio_pool_serve.api.http.endpoint import Call, Endpoint
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.errors import require_request
from trio_pool_serve.prompts import ChatPrompt, InputType
from trio_pool_serve.tasks.tokenize import computed_tokens, detokenize, tokenize, tokenize_conversation


@frozen(kw_only=True)
class TokenizeRequest(ConversationFields):
    """The body of ``/tokenize``: a ``prompt``, or the ``messages`` of one conversation. Optional fields may be null.

    ``tools`` are functions that the chat template describes. A conversation ends with the start of an answer, unless
    ``add_generation_prompt`` is false or it is left open, and gets no special tokens but the template's.

    ``input_type`` asks for the tokens that ``/pooling`` computes for a ``prompt`` of that type: with prompts and
    markers, expanded, and truncated to the model's maximum.
    """

    prompt: str | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    input_type: InputType | None = None

    def job(self, max_inputs: int) -> str | ChatPrompt:
        """Return the text or the conversation to be tokenized. Raises ``InvalidRequestError``."""
        given = the_one_given(prompt=self.prompt, messages=self.messages)
        if self.messages is None:
            self.refuse_chat_fields(given)
            require_request(
                self.input_type is None or self.add_special_tokens is not False,
                "Leave out `add_special_tokens`: input_type determines them.",
                param="add_special_tokens",
            )
            require_request(not self.tools, "Leave out `tools`: it is for messages, not for prompt.", param="tools")
            return self.prompt or ""
        refuse_given(self, ("input_type",), "is for prompt, not for messages")
        conversation, *others = self.conversations(self.messages, max_inputs, param=given)
        require_request(not others, "must be one conversation.", at="messages")
        is_default = self.flag("add_generation_prompt") is None
        return evolve(
            conversation,
            template_kwargs={**conversation.template_kwargs, **({"tools": self.tools} if self.tools else {})},
            add_generation_prompt=conversation.add_generation_prompt
            or (is_default and not conversation.continue_final_message),
        )


@frozen(kw_only=True)
class TokenizeResponse:
    """The response of ``/tokenize``; ``token_strs`` are the vocabulary's entries.

    ``kept`` is there with ``input_type``: whether ``token_embed`` returns a vector for each token.
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    kept: list[bool] | msgspec.UnsetType = msgspec.UNSET


async def respond_tokenize(call: Call[TokenizeRequest, str | ChatPrompt]) -> HttpResponse:
    """Tokenize. Errors: as ``tokenize``. Cancellation: at once."""
    special = call.wire.add_special_tokens
    if call.wire.input_type is not None and isinstance(call.job, str):
        computed = await computed_tokens(call.model, call.job, call.context, call.wire.input_type)
        encode = partial(_encode_tokens, call, computed.ids, computed.pieces, computed.kept)
        return await call.encode(encode, rows=len(computed.ids), nbytes=sum(map(len, computed.pieces)))
    if isinstance(call.job, ChatPrompt):
        tokens = await tokenize_conversation(call.model, call.job, call.context, add_special_tokens=bool(special))
    else:
        (tokens,) = await tokenize(call.model, [call.job], call.context, add_special_tokens=special is not False)
    ids, pieces = (token.id for token in tokens), (token.piece for token in tokens)
    encode = partial(_encode_tokens, call, ids, pieces)  # reads them in a thread if there are many
    return await call.encode(encode, rows=len(tokens), nbytes=sum(len(token.piece) for token in tokens))


def _encode_tokens(
    call: Call[TokenizeRequest, str | ChatPrompt],
    ids: Iterable[int],
    pieces: Iterable[str],
    kept: list[bool] | msgspec.UnsetType = msgspec.UNSET,
) -> HttpResponse:
    tokens = list(ids)
    return HttpResponse.json(
        TokenizeResponse(
            count=len(tokens),
            max_model_len=call.model.renderer.max_model_len,
            tokens=tokens,
            token_strs=list(pieces) if call.wire.return_token_strs else None,
            kept=kept,
        )
    )


@frozen(kw_only=True)
class DetokenizeRequest(WireRequest):
    """The body of ``/detokenize``, and of Cohere's ``/v1/detokenize``. Every optional field may be null."""

    tokens: list[TokenId]

    def job(self, _: int) -> npt.NDArray[np.int64]:
        """Return the token ids."""
        return np.array(self.tokens, dtype=np.int64)


@frozen
class DetokenizeResponse:
    """The response of ``/detokenize``."""

    prompt: str


async def respond_detokenize(
    call: Call[DetokenizeRequest, npt.NDArray[np.int64]], *, response: Callable[[str], object]
) -> HttpResponse:
    """Detokenize, special tokens too, and respond with ``response(text)``.

    Errors: as ``detokenize``. Cancellation: at once.
    """
    (text,) = await detokenize(call.model, [call.job], call.context, skip_special_tokens=False)
    return await call.encode(lambda: HttpResponse.json(response(text)), rows=1, nbytes=len(text))


TOKEN_ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (
    Endpoint(
        paths=("/tokenize",),
        wire=TokenizeRequest,
        respond=respond_tokenize,
        field_names={"prompts": ("messages", "prompt"), "template_kwargs": "chat_template_kwargs"},
        response=TokenizeResponse,
        summary="Show the tokens that the model would read.",
        example={"prompt": "A nursery owns its tasks.", "return_token_strs": True},
    ),
    Endpoint(
        paths=("/detokenize",),
        wire=DetokenizeRequest,
        respond=partial(respond_detokenize, response=DetokenizeResponse),
        field_names={"token_ids": "tokens"},
        response=DetokenizeResponse,
        summary="Turn tokens back into text.",
        example={"tokens": [5, 6, 7]},
    ),
)
