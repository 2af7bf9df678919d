"""The dialect of Elasticsearch's inference service ``hugging_face`` for rerankers, on a path of its own.

Its requests look as if vLLM's clients had sent them to ``/rerank``, and it accepts only an array as the response.
Its users enter the whole URL.
"""

from typing import Any

from attrs import frozen

from trio_pool_serve.api.dialects.tei.scoring_endpoints import respond_rerank
from trio_pool_serve.api.fields.field_values import TopN, WireRequest, require_least, require_some
from trio_pool_serve.api.http.endpoint import Dialect, Endpoint, string_error_body
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.score import ScoreJob


@frozen(kw_only=True)
class RerankRequest(WireRequest):
    """The body of ``/elasticsearch/rerank``."""

    query: str
    documents: list[str]
    top_n: TopN | None = None
    return_documents: bool | None = None

    @property
    def return_text(self) -> bool | None:
        """Whether the response has the documents, by TEI's name."""
        return self.return_documents

    def job(self, max_inputs: int) -> ScoreJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        require_some(self.documents, max_inputs, param="documents")
        require_least(self.top_n)
        return ScoreJob(
            queries=[self.query], documents=self.documents, input_params=InputParams(dialect_truncates=True)
        )


_RERANK: Endpoint[Any, ScoreJob] = Endpoint(
    paths=("/elasticsearch/rerank",),
    wire=RerankRequest,
    respond=respond_rerank,
    field_names={"prompts": None, "queries": "query"},
    summary="Sort documents by how well they fit a query.",
    example={
        "query": "What is a nursery?",
        "documents": ["Bread needs flour.", "A nursery owns its tasks."],
        "top_n": 1,
        "return_documents": True,
    },
)

ELASTICSEARCH = Dialect(name="elasticsearch", error_body=string_error_body, endpoints=(_RERANK,))
