"""``/score`` of vLLM: how well texts fit each other, one by one or one with many."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from attrs import frozen

from trio_pool_serve.api.fields.contents import ContentInput
from trio_pool_serve.api.fields.embedding_answers import Usage
from trio_pool_serve.api.fields.numbers import Priority, TokenCount, TruncationLength
from trio_pool_serve.api.fields.prompts import require_few
from trio_pool_serve.api.http.answer import Answer
from trio_pool_serve.api.http.endpoint import Call, Endpoint
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import EmptyInputError, InvalidRequestError
from trio_pool_serve.prompts import TruncationSide
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.score import ScoreJob, Scores, score
from trio_pool_serve.tasks.score_inputs import ScoreInput

NAMES = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"), ("queries", "items"))
"""What the two sides are called; vLLM has renamed them more than once."""

WireSide: TypeAlias = str | ContentInput | list[str | ContentInput]
"""A text, a content in parts, or several."""

OUR_PARAMS: Mapping[str | None, str | None] = {"input": None, "prompt": "instruction"}
"""What the tasks blame, by its name here. An ``input`` may be of either side, or both together."""


@frozen(kw_only=True)
class ScoreRequest:
    """The body of ``/score``: two sides, by any of their ``NAMES``. Every optional field may be null."""

    text_1: WireSide | None = None
    text_2: WireSide | None = None
    queries: WireSide | None = None
    documents: WireSide | None = None
    items: WireSide | None = None
    data_1: WireSide | None = None
    data_2: WireSide | None = None
    model: str | None = None
    max_tokens_per_query: TokenCount | None = None
    max_tokens_per_doc: TokenCount | None = None
    instruction: str | None = None
    truncate_prompt_tokens: TruncationLength | None = None
    truncation_side: TruncationSide | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    user: str | None = None
    priority: Priority | None = None
    request_id: str | None = None

    def job(self, network: NetworkConfig) -> ScoreJob:
        """Return what is asked, in the task's terms. Raises ``InvalidRequestError``."""
        first, second = self._names()
        ones, others = self._side(first, network), self._side(second, network)
        if len(ones) not in (1, len(others)):
            raise InvalidRequestError(
                f"{len(ones)} {first} and {len(others)} {second}: {first} must be one text, or as many as {second}.",
                param=first,
            )
        return ScoreJob(
            queries=ones,
            documents=others,
            reading=InputParams(
                truncate_to=self.truncate_prompt_tokens,
                truncation_side=self.truncation_side or "right",
                instruction=self.instruction,
            ),
            max_query_tokens=self.max_tokens_per_query,
            max_document_tokens=self.max_tokens_per_doc,
            activation="raw" if False in (self.use_activation, self.activation) else "score",
            priority=self.priority or 0,
        )

    def _names(self) -> tuple[str, str]:
        given = [pair for pair in NAMES if all(getattr(self, name) is not None for name in pair)]
        if len(given) == 1:
            return given[0]
        pairs = ", or ".join(f"{first} and {second}" for first, second in NAMES)
        raise InvalidRequestError(f"Give {'one' if given else 'both'} of {pairs}.", param=_missing(self))

    def _side(self, name: str, network: NetworkConfig) -> Sequence[ScoreInput]:
        given: WireSide = getattr(self, name)
        sides = given if isinstance(given, list) else [given]
        if not sides:
            raise EmptyInputError(f"{name} is empty.", param=name)
        require_few(sides, network, param=name)
        return [
            side if isinstance(side, str) else side.prompt(network, name if sides is not given else f"{name}[{index}]")
            for index, side in enumerate(sides)
        ]


def _missing(wire: ScoreRequest) -> str | None:
    """Return the field that would complete a side that is alone."""
    for first, second in NAMES:
        has_first, has_second = getattr(wire, first) is not None, getattr(wire, second) is not None
        if has_first != has_second:
            return second if has_first else first
    return None


@frozen(kw_only=True)
class ScoreItem:
    """How well one document fits its query."""

    index: int
    score: float
    object: Literal["score"] = "score"


@frozen(kw_only=True)
class ScoreResponse:
    """The answer of ``/score``."""

    id: str
    created: int
    model: str
    data: list[ScoreItem]
    usage: Usage
    object: Literal["list"] = "list"


async def score_job(call: Call[Any, ScoreJob]) -> Scores:
    """Have a job done for routes with the fields of ``ScoreRequest``.

    Raises what ``score`` raises, and ``PoolServeError`` for scores that are no numbers. Cancellation: at once.
    """
    try:
        scores = await score(call.model, call.job, call.timings)
    except InvalidRequestError as error:
        error.param = OUR_PARAMS.get(error.param, error.param)
        raise
    return scores


async def answer_score(call: Call[ScoreRequest, ScoreJob]) -> Answer:
    """Score. Raises what ``score_job`` raises. Cancellation: at once."""
    scores = await score_job(call)

    def encode() -> Answer:
        answer = ScoreResponse(
            id=f"score-{call.wire.request_id or call.request_id}",
            created=int(time.time()),
            model=call.model.name,
            data=[ScoreItem(index=index, score=value) for index, value in enumerate(scores.values.tolist())],
            usage=Usage.of(scores.prompt_tokens),
        )
        return Answer(msgspec.json.encode(answer))

    return await call.encode(encode, rows=len(scores.values), nbytes=scores.values.nbytes)


SCORE: Endpoint[ScoreRequest, ScoreJob] = Endpoint(
    paths=("/score", "/v1/score"),
    wire=ScoreRequest,
    read=ScoreRequest.job,
    answer=answer_score,
    response=ScoreResponse,
    summary="Score how well texts fit each other: one with one, one with many, or many one by one.",
    example={
        "text_1": "What does a nursery do?",
        "text_2": ["A nursery owns its tasks.", "Bread needs flour."],
    },
)
