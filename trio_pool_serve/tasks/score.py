"""Scoring of documents against queries, as the model requires: in pairs, by vectors or by late interaction."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
from attrs import Factory, evolve, frozen

from trio_pool_serve.engine.admission import AdmittedRequest
from trio_pool_serve.errors import EmptyInputError, JobField, require_request
from trio_pool_serve.models.model_kind import Scoring, Similarity
from trio_pool_serve.prompts import InputType, PairPrompt, RenderingParams, ScoreInput, has_images, prompt_of, text_of
from trio_pool_serve.runner.openvino.heads import max_sim
from trio_pool_serve.tasks.fan_out import ComputedRow, RowToCompute, compute_rows
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.tasks.pool import BYTES_PER_NUMBER, pooled_tokens, with_few_numbers
from trio_pool_serve.tasks.request_context import RequestContext
from trio_pool_serve.types import Activation, Classify, Embed, MaxSim, TokenEmbed, Vectors

LOOP_BYTES = 256 * 1024
"""Up to this many bytes of vectors are compared on the event loop: 64 of 1024 numbers took 83 µs, 170 of 384 took
122 µs."""


@frozen(eq=False, kw_only=True)
class ScoreJob:
    """Documents, and the queries to score them against: one for all documents, or one for each.

    ``max_query_tokens`` and ``max_document_tokens`` truncate each text. ``activation`` is for cross-encoders and
    generative rerankers, which compute both texts as a pair; for these, ``truncate_to`` of ``input_params`` is the
    length of the pair. ``symmetric``: both sides are embedded without an input type.
    """

    queries: Sequence[ScoreInput]
    documents: Sequence[ScoreInput]
    input_params: InputParams = Factory(InputParams)
    max_query_tokens: int | None = None
    max_document_tokens: int | None = None
    activation: Activation = "score"
    symmetric: bool = False
    priority: int = 0

    def __attrs_post_init__(self) -> None:
        empty: JobField = "documents" if self.queries else "queries"
        if not self.queries or not self.documents:
            raise EmptyInputError(f"{{{empty}}} is empty.", field=empty)
        require_request(
            len(self.queries) in (1, len(self.documents)),
            f"{len(self.queries)} queries and {len(self.documents)} documents: send one query, or one for each "
            "document.",
            field="queries",
        )
        limits: dict[JobField, int | None] = {
            "max_query_tokens": self.max_query_tokens,
            "max_document_tokens": self.max_document_tokens,
        }
        for name, limit in limits.items():
            require_request(limit is None or limit >= 1, f"{{{name}}} must be at least 1, not {limit}.", field=name)

    def query_of(self, document: int) -> int:
        """Return the index of a document's query."""
        return document if len(self.queries) > 1 else 0

    def estimated_tokens(self, *, in_pairs: bool) -> int:
        """Estimate the tokens for admission, without tokenising; in pairs, every row has a query."""
        queries = sum(prompt_of(side).estimated_tokens for side in self.queries)
        documents = sum(prompt_of(side).estimated_tokens for side in self.documents)
        query_rows = len(self.documents) if in_pairs else len(self.queries)
        return queries * (query_rows // len(self.queries)) + documents + self.input_params.estimated_tokens(query_rows)


@frozen(eq=False)
class Scores:
    """The scores of the documents in order, float32, shape (documents,), and the total number of tokens."""

    values: npt.NDArray[np.float32]
    prompt_tokens: int


async def score(model: Model, job: ScoreJob, context: RequestContext) -> Scores:
    """Score each document against its query; greater is better.

    Raises ``InvalidRequestError``, ``OverloadedError``, and as ``compute_rows``. Cancellation: at once; its rows leave
    the queue.
    """
    model.require("score")
    scoring = model.folder.spec.scoring
    assert scoring is not None  # noqa: S101  (every model that supports "score" has it)
    in_pairs = scoring == "pairs"
    inputs = len(job.documents) + (0 if in_pairs else len(job.queries))
    estimate = min(job.estimated_tokens(in_pairs=in_pairs), inputs * model.renderer.max_model_len)
    work = context.work(
        estimate, inputs, priority=job.priority, has_images=any(map(has_images, (*job.queries, *job.documents)))
    )
    with model.admit(work) as admitted:
        return await SCORERS[scoring](model, job, context, admitted)


async def _score_pairs(model: Model, job: ScoreJob, context: RequestContext, admitted: AdmittedRequest) -> Scores:
    """Compute each query and document as one row, for cross-encoders and generative rerankers."""
    rendering = model.rendering_params(job.input_params)
    require_request(
        not any(map(has_images, (*job.queries, *job.documents))),
        "This model scores pairs of texts; it accepts no images.",
        field="prompts",
    )
    queries, documents = list(map(text_of, job.queries)), list(map(text_of, job.documents))
    limits, params = (job.max_query_tokens, job.max_document_tokens), (Classify(job.activation),)
    to_compute = [
        RowToCompute(PairPrompt(queries[job.query_of(index)], document, *limits), rendering, params)
        for index, document in enumerate(documents)
    ]
    fields: Mapping[JobField, int] = {"documents": len(documents)}
    return _scores_of(await compute_rows(model, to_compute, admitted, context.timings, fields=fields))


async def _score_vectors(model: Model, job: ScoreJob, context: RequestContext, admitted: AdmittedRequest) -> Scores:
    """Embed every text once, and compare the vectors with the model's similarity function."""
    sides = [
        *((side, _rendering(model, job, None if job.symmetric else "query")) for side in job.queries),
        *((side, _rendering(model, job, None if job.symmetric else "document")) for side in job.documents),
    ]
    params = (Embed(),)
    to_compute = [RowToCompute(prompt_of(side), rendering, params) for side, rendering in sides]
    fields: Mapping[JobField, int] = {"queries": len(job.queries), "documents": len(job.documents)}
    rows = await compute_rows(model, to_compute, admitted, context.timings, fields=fields)
    vectors = [row.vector for row in rows]

    def compare() -> npt.NDArray[np.float32]:
        queries, documents = np.stack(vectors[: len(job.queries)]), np.stack(vectors[len(job.queries) :])
        # One query is compared with all documents, several with one each.
        return SIMILARITIES[model.folder.spec.similarity](queries, documents).astype(np.float32)

    is_small = sum(vector.nbytes for vector in vectors) <= LOOP_BYTES
    values = compare() if is_small else await model.renderer.offload.run("postprocess", compare)
    return Scores(values, sum(row.tokens for row in rows))


async def _score_late_interaction(
    model: Model, job: ScoreJob, context: RequestContext, admitted: AdmittedRequest
) -> Scores:
    """Compute the queries' token vectors, then score the documents against them on the device.

    Documents whose vectors are pooled are scored here, as pooling is.
    """
    pooling, spec = model.folder.spec.token_pooling, model.folder.spec
    dimensions = model.dimensions

    def reserve(vectors: int) -> None:
        context.reservation.grow(vectors * dimensions * BYTES_PER_NUMBER)

    fields: Mapping[JobField, int] = {"queries": len(job.queries)}
    rendering, per_token = _rendering(model, job, "query"), (TokenEmbed(),)
    to_compute = [RowToCompute(prompt_of(side), rendering, per_token) for side in job.queries]
    rows = await compute_rows(model, to_compute, admitted, context.timings, fields=fields, reserve=reserve)
    queries = [row.vector for row in rows]
    if pooling is not None and pooling.applies_to("query"):
        queries = [await pooled_tokens(model, vectors, pooling) for vectors in queries]
    # Copies, because a view would keep the outputs of its batch.
    of_vectors = {id(vectors): (MaxSim(vectors.copy()),) for vectors in queries}
    params = [of_vectors[id(vectors)] for vectors in queries]  # equal queries have the same
    rendering, query_tokens = _rendering(model, job, "document"), sum(row.tokens for row in rows)
    fields = {"documents": len(job.documents)}
    if pooling is None or not pooling.applies_to("document"):
        to_compute = [
            RowToCompute(prompt_of(side), rendering, params[job.query_of(index)])
            for index, side in enumerate(job.documents)
        ]
        rows = await compute_rows(model, to_compute, admitted, context.timings, fields=fields)
        return _scores_of(rows, query_tokens)
    reserve_few = with_few_numbers(reserve, dimensions, "documents")
    to_compute = [RowToCompute(prompt_of(side), rendering, per_token) for side in job.documents]
    rows = await compute_rows(model, to_compute, admitted, context.timings, fields=fields, reserve=reserve_few)
    scores = []
    for index, row in enumerate(rows):
        [param] = params[job.query_of(index)]
        of_query = partial(max_sim, param.query, mean_scores=spec.mean_scores)
        scores.append(await pooled_tokens(model, row.vector, pooling, of_query))
    return Scores(np.concatenate(scores), query_tokens + sum(row.tokens for row in rows))


SCORERS: Mapping[Scoring, Callable[[Model, ScoreJob, RequestContext, AdmittedRequest], Awaitable[Scores]]] = {
    "pairs": _score_pairs,
    "vectors": _score_vectors,
    "late_interaction": _score_late_interaction,
}


def _cosine(queries: Vectors, documents: Vectors) -> Vectors:
    lengths = np.linalg.norm(queries, axis=1) * np.linalg.norm(documents, axis=1)
    cosines: Vectors = (queries * documents).sum(axis=1) / np.maximum(lengths, 1e-12)
    return cosines


SIMILARITIES: Mapping[Similarity, Callable[[Vectors, Vectors], Vectors]] = {
    "cosine": _cosine,
    "dot": lambda queries, documents: (queries * documents).sum(axis=1),
    "euclidean": lambda queries, documents: -np.linalg.norm(queries - documents, axis=1),
    "manhattan": lambda queries, documents: -np.abs(queries - documents).sum(axis=1),
}
"""Row by row: arrays of shape (1 or rows, dimensions) and (rows, dimensions) to shape (rows,)."""


def _rendering(model: Model, job: ScoreJob, input_type: InputType | None) -> RenderingParams:
    """Return the rendering params of one side's texts."""
    # A client's instruction describes the search: it is not put in front of documents.
    instruction = None if input_type == "document" else job.input_params.instruction
    rendering = model.rendering_params(evolve(job.input_params, input_type=input_type, instruction=instruction))
    return evolve(rendering, max_text_tokens=job.max_query_tokens if input_type == "query" else job.max_document_tokens)


def _scores_of(rows: Sequence[ComputedRow], query_tokens: int = 0) -> Scores:
    return Scores(np.concatenate([row.vector for row in rows]), query_tokens + sum(row.tokens for row in rows))
