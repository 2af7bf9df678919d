"""Late interaction in two stages: queries are encoded once, then documents are scored against them.

Stage one returns ``EncodedQueries``, which only stage two accepts: neither stage can run in the other's place. The
vectors that stage one leaves on the device belong to a scope that the caller opens and that ends with the request. They
are found by an object that only this request has, never by a name.
"""

from collections.abc import Sequence

from attrs import frozen

from trio_pool_serve.engine.admission import AdmittedRequest
from trio_pool_serve.prompts import RenderingParams, ScoreInput, prompt_of
from trio_pool_serve.tasks.fan_out import ComputedRow, RowToCompute, compute_rows
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.types import HeldQuery, HoldQuery, MaxSim, QueryScope


@frozen(eq=False)
class EncodedQueries:
    """Queries whose token vectors are on the device, in the order of the request, and their number of tokens."""

    held: Sequence[HeldQuery]
    tokens: int


@frozen(eq=False)
class Document:
    """A document, and the index of the query that it is scored against."""

    side: ScoreInput
    query: int


async def encode_queries(
    model: Model,
    queries: Sequence[ScoreInput],
    scope: QueryScope,
    *,
    rendering: RenderingParams,
    timings: RequestTimings,
    admitted: AdmittedRequest,
) -> EncodedQueries:
    """Encode queries, and leave their vectors in ``scope``.

    Raises what ``compute_rows`` raises. Cancellation: at once; vectors that the device still computes are freed with
    the scope, or as soon as they are computed if it is closed by then.
    """
    held = [HeldQuery(scope) for _ in queries]
    sides = zip(queries, held, strict=True)
    to_compute = [RowToCompute(prompt_of(side), rendering, (HoldQuery(query),)) for side, query in sides]
    rows = await compute_rows(model, to_compute, timings, admitted)
    return EncodedQueries(held, sum(row.tokens for row in rows))


async def score_documents(
    model: Model,
    documents: Sequence[Document],
    queries: EncodedQueries,
    *,
    rendering: RenderingParams,
    timings: RequestTimings,
    admitted: AdmittedRequest,
) -> list[ComputedRow]:
    """Return a row for each document, whose only output is its score, shape (1,).

    Raises what ``compute_rows`` raises. Cancellation: at once; nothing of the documents stays in the queue.
    """
    to_compute = [
        RowToCompute(prompt_of(document.side), rendering, (MaxSim(queries.held[document.query]),))
        for document in documents
    ]
    return await compute_rows(model, to_compute, timings, admitted)
