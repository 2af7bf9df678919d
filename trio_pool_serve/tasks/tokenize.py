"""Tokenising and detokenising. Refused while the queue is full, as other requests are."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from attrs import frozen

from trio_pool_serve.errors import InvalidRequestError, require_request
from trio_pool_serve.prompts import ChatPrompt, InputType, TextPrompt
from trio_pool_serve.rendering.text.tokenizer import Token
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.tasks.request_context import RequestContext

MAX_CHARACTERS = 200_000
"""Maximum characters of a request: each token is a separate object until the response is encoded."""


async def tokenize(
    model: Model, texts: Sequence[str], context: RequestContext, *, add_special_tokens: bool, instruction: str = ""
) -> list[list[Token]]:
    """Return the tokens of each text, not truncated, with ``instruction`` in front of every text.

    Raises ``OverloadedError``, and ``InvalidRequestError``, also for more than ``MAX_CHARACTERS`` in total.
    Cancellation: at once; a thread that tokenises finishes its text.
    """
    _refuse(model, sum(map(len, texts)) + len(instruction) * len(texts), context)
    renderer, client = model.renderer, context.client.number
    return [
        await renderer.tokenize(instruction + text, client, add_special_tokens=add_special_tokens) for text in texts
    ]


def _refuse(model: Model, characters: int, context: RequestContext) -> None:
    require_request(
        characters <= MAX_CHARACTERS,
        f"The texts have {characters} characters; the limit is {MAX_CHARACTERS}.",
        field="prompts",
    )
    model.engine.refuse_late(context.work(0))


async def tokenize_conversation(
    model: Model, prompt: ChatPrompt, context: RequestContext, *, add_special_tokens: bool
) -> list[Token]:
    """Return the tokens of a conversation of texts, not truncated. Raises and cancellation: as ``tokenize``."""
    model.engine.refuse_late(context.work(0))
    text = await model.renderer.conversation_text(prompt, context.client.number)
    return (await tokenize(model, [text], context, add_special_tokens=add_special_tokens))[0]


@frozen(eq=False)
class ComputedTokens:
    """The tokens that are computed for a text, with prompts and markers: ids and entries of the vocabulary.

    ``kept`` tells which of them have a vector in the output of ``token_embed``.
    """

    ids: list[int]
    pieces: list[str]
    kept: list[bool]


async def computed_tokens(
    model: Model, text: str, context: RequestContext, input_type: InputType | None
) -> ComputedTokens:
    """Return the tokens that are computed for a text of an input type, truncated to the model's maximum.

    Raises as ``tokenize``. Cancellation: as there.
    """
    _refuse(model, len(text), context)
    params = model.rendering_params(InputParams(truncate_to=-1, input_type=input_type))
    rendered = await model.renderer.render(TextPrompt(text), params, context.client)
    ids = rendered.token_ids.tolist()
    kept = [True] * len(ids) if rendered.kept is None else rendered.kept.tolist()
    return ComputedTokens(ids, await model.renderer.pieces(rendered.token_ids, context.client.number), kept)


async def detokenize(
    model: Model, ids: Sequence[npt.NDArray[np.int64]], context: RequestContext, *, skip_special_tokens: bool
) -> list[str]:
    """Return the text of each list of token ids.

    Raises ``OverloadedError``, and ``InvalidRequestError`` for ids outside the vocabulary. Cancellation: as
    ``tokenize``.
    """
    model.engine.refuse_late(context.work(0))
    size = model.renderer.texts.vocab_size
    for row in ids:
        outside = row[(row < 0) | (row >= size)]
        if len(outside):
            raise InvalidRequestError(
                f"{{token_ids}} has {outside[0]}; this model's vocabulary has the ids 0 to {size - 1}.",
                field="token_ids",
            )
    renderer, client = model.renderer, context.client.number
    return [await renderer.detokenize(row, client, skip_special_tokens=skip_special_tokens) for row in ids]
