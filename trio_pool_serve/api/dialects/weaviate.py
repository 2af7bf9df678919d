"""The dialect of Weaviate's inference containers: ``/vectors`` for one text, and ``/rerank`` with ``property``."""

from typing import Literal

import msgspec
from attrs import frozen

from trio_pool_serve.api.fields.embedding_responses import refuse_embeddings
from trio_pool_serve.api.fields.encodings import VectorEncoding
from trio_pool_serve.api.fields.field_values import Dimensions, WireRequest, require_some
from trio_pool_serve.api.fields.input_fields import with_input_type
from trio_pool_serve.api.http.endpoint import Call, Dialect, Endpoint, string_error_body
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.prompts import TextPrompt, text_of
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.pool import PoolJob, pool
from trio_pool_serve.tasks.score import ScoreJob, score

TRUNCATED = InputParams(dialect_truncates=True)


@frozen(kw_only=True)
class VectorConfig:
    """How a text is embedded. ``pooling_strategy`` has no effect: the model's files decide the pooling.

    Weaviate sends a strategy with every text, and its own containers follow the files, too.
    """

    pooling_strategy: Literal["masked_mean", "cls"] | None = None
    task_type: Literal["query", "passage"] | None = None
    dimensions: Dimensions | None = None


@frozen(kw_only=True)
class VectorsRequest(WireRequest):
    """The body of ``/vectors``."""

    text: str
    config: VectorConfig | None = None

    def job(self, _: int) -> PoolJob:
        """Return the job of the request."""
        return PoolJob(
            prompts=[TextPrompt(self.text)],
            input_params=TRUNCATED,
            dimensions=(self.config or VectorConfig()).dimensions or None,
        )


@frozen(kw_only=True)
class VectorsResponse:
    """The text and its vector, of ``dim`` numbers."""

    text: str
    vector: msgspec.Raw
    dim: int


async def respond_vectors(call: Call[VectorsRequest, PoolJob]) -> HttpResponse:
    """Embed. Errors: as ``pool``. Cancellation: at once."""
    refuse_embeddings(call)
    task = (call.wire.config or VectorConfig()).task_type
    pooled = await pool(call.model, with_input_type(call.job, task, call.model, param="config"), call.context)
    ((vector,),) = pooled.rows
    dim: int = vector.shape[-1]  # type: ignore[union-attr]
    return HttpResponse.json(VectorsResponse(text=call.wire.text, vector=VectorEncoding().json(vector), dim=dim))


@frozen(kw_only=True)
class RerankRequest(WireRequest):
    """The body of ``/rerank`` with ``property``, a name in Weaviate's schema, which may be empty."""

    query: str
    documents: list[str]
    property: str | None = None

    def job(self, max_inputs: int) -> ScoreJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        require_some(self.documents, max_inputs, param="documents")
        return ScoreJob(queries=[self.query], documents=self.documents, input_params=TRUNCATED)


@frozen
class DocumentScore:
    """A document and its score."""

    document: str
    score: float


@frozen(kw_only=True)
class RerankResponse:
    """The documents in the order of the request."""

    query: str
    scores: list[DocumentScore]


async def respond_rerank(call: Call[RerankRequest, ScoreJob]) -> HttpResponse:
    """Score. Errors: as ``score``. Cancellation: at once."""
    scores, documents = await score(call.model, call.job, call.context), list(map(text_of, call.job.documents))
    return await call.encode(
        lambda: HttpResponse.json(
            RerankResponse(query=call.wire.query, scores=list(map(DocumentScore, documents, scores.values.tolist())))
        ),
        rows=len(documents),
        nbytes=sum(map(len, documents)),
    )


WEAVIATE = Dialect(
    name="weaviate",
    error_body=string_error_body,
    endpoints=(
        Endpoint(
            paths=("/vectors",),
            wire=VectorsRequest,
            respond=respond_vectors,
            field_names={"prompts": "text", "dimensions": "config"},
            response=VectorsResponse,
            summary="Embed a text.",
            example={"text": "A nursery owns its tasks.", "config": {"pooling_strategy": "masked_mean"}},
        ),
        Endpoint(
            paths=("/rerank",),
            discriminators=frozenset({"property"}),
            wire=RerankRequest,
            respond=respond_rerank,
            field_names={"prompts": None, "queries": "query"},
            response=RerankResponse,
            summary="Score documents by how well they fit a query.",
            example={
                "query": "What is a nursery?",
                "documents": ["Bread needs flour.", "A nursery owns its tasks."],
                "property": "",
            },
        ),
    ),
)
