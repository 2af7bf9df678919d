"""The dialect of NVIDIA NIM: ``/v1/ranking``, which responds with logits.

Its ``/v1/embeddings`` is among the dialects of Voyage and Jina, which have its fields.
"""

from typing import Literal

from attrs import frozen

from trio_pool_serve.api.dialects import openai
from trio_pool_serve.api.fields.embedding_responses import Usage
from trio_pool_serve.api.fields.field_values import TopK, WireRequest, refused, require_least, require_some
from trio_pool_serve.api.fields.ranking import respond_ranking
from trio_pool_serve.api.http.endpoint import Call, Dialect, Endpoint
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.score import ScoreJob


@frozen(kw_only=True)
class RankedText:
    """A query, or a passage."""

    text: str
    image: str | None = refused("only texts are ranked")


@frozen(kw_only=True)
class RankingRequest(WireRequest):
    """The body of ``/v1/ranking``. litellm sends ``top_k`` besides NIM's own fields."""

    query: RankedText
    passages: list[RankedText]
    truncate: Literal["NONE", "END"] | None = None
    top_k: TopK | None = None

    def job(self, max_inputs: int) -> ScoreJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        require_some(self.passages, max_inputs, param="passages")
        require_least(self.top_k, least=1, param="top_k")
        return ScoreJob(
            queries=[self.query.text],
            documents=[passage.text for passage in self.passages],
            input_params=InputParams(
                truncate_to=-1 if self.truncate == "END" else None, refuses_longer=self.truncate == "NONE"
            ),
            activation="raw",
        )


@frozen
class Ranking:
    """One passage's index in the request, and its logit."""

    index: int
    logit: float


@frozen(kw_only=True)
class RankingResponse:
    """The passages, best first."""

    rankings: list[Ranking]
    usage: Usage


async def respond(call: Call[RankingRequest, ScoreJob]) -> HttpResponse:
    """Rerank. Errors: as ``score``. Cancellation: at once."""
    return await respond_ranking(
        call,
        lambda scores, rankings: RankingResponse(rankings=rankings, usage=Usage.of(scores.prompt_tokens)),
        top_n=call.wire.top_k,
        result=lambda index, logit, _: Ranking(index, logit),
        document=None,
    )


NIM = Dialect(
    name="nim",
    error_body=openai.error_body,
    endpoints=(
        Endpoint(
            paths=("/v1/ranking", "/ranking", "/v1/reranking", "/reranking", "/v1/retrieval/{name}/reranking"),
            wire=RankingRequest,
            respond=respond,
            field_names={"prompts": None, "queries": "query", "documents": "passages", "truncate_to": "truncate"},
            response=RankingResponse,
            summary="Sort passages by how well they fit a query, by their logits.",
            example={
                "query": {"text": "What is a nursery?"},
                "passages": [{"text": "Bread needs flour."}, {"text": "A nursery owns its tasks."}],
                "truncate": "END",
            },
        ),
    ),
)
