"""``/v2/rerank``."""

from functools import partial

from attrs import frozen

from trio_pool_serve.api.dialects.vllm.scoring_endpoints import SCORE_FIELD_NAMES, RerankOptions
from trio_pool_serve.api.fields.field_values import require_few
from trio_pool_serve.api.fields.ranking import RankedDocuments, RerankDocument, require_top, respond_results
from trio_pool_serve.api.http.endpoint import Endpoint
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.tasks.score import ScoreJob


@frozen(kw_only=True)
class RerankRequest(RerankOptions):
    """The body of ``/v2/rerank``, which clients of vLLM send its options too.

    Documents that are too long are truncated, as Cohere does it. ``return_documents`` is a field of version 1.
    """

    query: str
    documents: str | RerankDocument | list[str | RerankDocument]

    def job(self, network: NetworkConfig) -> ScoreJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        given = self.documents if isinstance(self.documents, list) else [self.documents]
        require_few(len(given), network, param="documents")
        require_top(self.top_n)
        documents = [document if isinstance(document, str) else document.text for document in given]
        return self.score_job([self.query], documents, truncate_to=-1)


SCORING_ENDPOINTS: tuple[Endpoint[RerankRequest, ScoreJob], ...] = (
    Endpoint(
        paths=("/v2/rerank",),
        wire=RerankRequest,
        respond=partial(respond_results, response=RankedDocuments, version="2"),
        field_names=SCORE_FIELD_NAMES,
        response=RankedDocuments,
        summary="Sort documents by how well they fit a query.",
        example={
            "query": "What is a nursery?",
            "documents": ["A nursery owns its tasks.", "Bread needs flour."],
            "top_n": 1,
        },
    ),
)
