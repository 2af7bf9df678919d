"""``/rerank`` and ``/similarity``."""

from typing import Any

import msgspec
from attrs import frozen

from trio_pool_serve.api.dialects.tei.pooling_endpoints import TEXTS, TextOptions, respond_timed
from trio_pool_serve.api.fields.encodings import number_items, row_json
from trio_pool_serve.api.fields.field_values import (
    TopN,
    WireRequest,
    require_few,
    require_given,
    require_least,
    require_some,
)
from trio_pool_serve.api.fields.ranking import ranked
from trio_pool_serve.api.http.endpoint import Call, Endpoint
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.prompts import text_of
from trio_pool_serve.tasks.score import ScoreJob, score


@frozen(kw_only=True)
class RerankRequest(WireRequest, TextOptions):
    """The body of ``/rerank``; litellm sends ``top_n`` besides TEI's own fields."""

    query: str
    texts: list[str]
    raw_scores: bool | None = None
    return_text: bool | None = None
    top_n: TopN | None = None

    def job(self, max_inputs: int) -> ScoreJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        require_least(self.top_n)
        require_some(self.texts, max_inputs, param="texts")
        return ScoreJob(
            queries=[self.query],
            documents=self.texts,
            input_params=self.input_params(),
            activation="raw" if self.raw_scores else "score",
        )


@frozen(kw_only=True)
class SimilarityInputs:
    """A sentence, and the sentences that it is compared with."""

    source_sentence: str
    sentences: list[str]


@frozen(kw_only=True)
class SimilarityRequest(WireRequest):
    """The body of ``/similarity``."""

    inputs: SimilarityInputs
    parameters: TextOptions | None = None

    def job(self, max_inputs: int) -> ScoreJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        require_given(self.inputs.sentences, at="inputs.sentences")
        require_few(len(self.inputs.sentences), max_inputs, param="inputs")
        return ScoreJob(
            queries=[self.inputs.source_sentence],
            documents=self.inputs.sentences,
            input_params=(self.parameters or TextOptions()).input_params(),
            symmetric=True,
        )


async def respond_rerank(call: Call[Any, ScoreJob]) -> HttpResponse:
    """Respond to ``/rerank``: the texts' indices and scores, best first.

    Errors: as ``score``. Cancellation: at once.
    """
    scores = await score(call.model, call.job, call.context)
    texts = list(map(text_of, call.job.documents)) if call.wire.return_text else None

    def encode() -> HttpResponse:
        numbers = number_items(scores.values)
        return HttpResponse.json(
            [
                {"index": index, "score": msgspec.Raw(numbers[index]), **({"text": texts[index]} if texts else {})}
                for index, _ in ranked(scores.values, call.wire.top_n)
            ]
        )

    return await respond_timed(
        call,
        encode,
        rows=len(scores.values),
        nbytes=scores.values.nbytes if texts is None else sum(map(len, texts)),
        tokens=scores.prompt_tokens,
        characters=_characters(call.job, in_pairs=True),
    )


async def respond_similarity(call: Call[Any, ScoreJob]) -> HttpResponse:
    """Respond to ``/similarity``: a number per sentence, in order.

    Errors: as ``score``. Cancellation: at once.
    """
    scores = await score(call.model, call.job, call.context)
    return await respond_timed(
        call,
        lambda: HttpResponse(row_json(scores.values, "float32")),
        rows=1,
        nbytes=scores.values.nbytes,
        tokens=scores.prompt_tokens,
        characters=_characters(call.job, in_pairs=False),
    )


def _characters(job: ScoreJob, *, in_pairs: bool) -> int:
    """Count the characters of all texts; if they are read ``in_pairs``, the query's once for each document."""
    queries = sum(len(text_of(side)) for side in job.queries) * (len(job.documents) if in_pairs else 1)
    return queries + sum(len(text_of(side)) for side in job.documents)


SCORING_ENDPOINTS: tuple[Endpoint[Any, ScoreJob], ...] = (
    Endpoint(
        paths=("/rerank",),
        discriminators=frozenset({"texts"}),
        wire=RerankRequest,
        respond=respond_rerank,
        field_names={"prompts": None, "queries": "query", "documents": "texts", "truncate_to": "truncate"},
        summary="Sort texts by how well they match a query.",
        example={"query": "Who owns a task?", "texts": TEXTS},
    ),
    Endpoint(
        paths=("/similarity",),
        wire=SimilarityRequest,
        respond=respond_similarity,
        field_names={"prompts": "inputs", "queries": "inputs", "documents": "inputs", "truncate_to": "parameters"},
        summary="Compare a sentence with others.",
        example={"inputs": {"source_sentence": "Who owns a task?", "sentences": TEXTS}},
    ),
)
