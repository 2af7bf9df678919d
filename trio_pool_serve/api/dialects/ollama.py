"""The Ollama dialect: ``/api/embed``, the older ``/api/embeddings``, and ``/api/rerank`` as Dify calls it."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
from attrs import evolve, frozen

from trio_pool_serve.api.fields.embedding_responses import pool_limited
from trio_pool_serve.api.fields.encodings import VectorEncoding
from trio_pool_serve.api.fields.field_values import (
    INT32,
    Dimensions,
    TokenCount,
    TopN,
    WireRequest,
    quoted,
    require_few,
    require_least,
    require_some,
)
from trio_pool_serve.api.fields.ranking import RerankResult, respond_ranking
from trio_pool_serve.api.http.endpoint import Call, Dialect, Endpoint, WireError, string_error_body
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.errors import (
    ContextLengthError,
    NotFoundError,
    OverloadedError,
    require_request,
)
from trio_pool_serve.prompts import TextPrompt
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.pool import PoolJob
from trio_pool_serve.tasks.score import ScoreJob
from trio_pool_serve.types import Vectors

DURATION = re.compile(r"[-+]?(?:0|(?:(?:\d+\.?\d*|\.\d+)(?:ns|us|µs|ms|s|m|h))+)")
"""A duration as Go writes it."""

MAX_DURATION_CHARACTERS = 64

Seconds: TypeAlias = Annotated[float, msgspec.Meta(**INT32, description="Negative for ever.")]

MAX_NAME = 200
"""Characters of a model's name that an error shows."""


@frozen(kw_only=True)
class Options:
    """The options that concern an embedding; the others are of sampling, and of how Ollama computes."""

    num_ctx: TokenCount | None = None


@frozen(kw_only=True)
class OllamaRequest(WireRequest):
    """The fields of every request.

    ``keep_alive`` (seconds, or a duration such as ``5m``) has no effect: a model is shared by all clients, and the
    server's settings decide how long it stays loaded.
    """

    options: Options | None = None
    keep_alive: Seconds | str | None = None

    def require_valid(self) -> None:
        """Raise ``InvalidRequestError`` for fields of every request."""
        require_request(bool(self.model), "is required", at="model")
        given = self.keep_alive
        require_request(
            not isinstance(given, str) or (len(given) <= MAX_DURATION_CHARACTERS and bool(DURATION.fullmatch(given))),
            f"must be a number of seconds, or a duration such as 5m, not {quoted(given)}.",
            at="keep_alive",
        )
        require_least(self.num_ctx, least=1, param="options.num_ctx")

    @property
    def num_ctx(self) -> int | None:
        """The maximum length of an input that the client wants, in tokens."""
        return None if self.options is None else self.options.num_ctx

    def pool_job(
        self, texts: Sequence[str], *, truncates: bool, normalize: bool, dimensions: int | None = None
    ) -> PoolJob:
        """Return the job for texts; none if there are no texts. Raises ``InvalidRequestError``."""
        self.require_valid()
        return PoolJob(
            prompts=list(map(TextPrompt, texts)),
            input_params=InputParams(truncate_to=-1 if truncates else None, refuses_longer=not truncates),
            dimensions=dimensions,
            normalize=normalize,
        )


@frozen(kw_only=True)
class EmbedRequest(OllamaRequest):
    """The body of ``/api/embed``. ``dimensions`` that the model does not have are no error."""

    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: Dimensions | None = None

    def job(self, max_inputs: int) -> PoolJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        texts = self.input if isinstance(self.input, list) else [self.input] if self.input else []
        require_few(len(texts), max_inputs, param="input")
        require_least(self.dimensions, param="dimensions")
        truncates = self.truncate is not False
        return self.pool_job(texts, truncates=truncates, normalize=True, dimensions=self.dimensions or None)


@frozen(kw_only=True)
class EmbedResponse:
    """A vector of unit length for each input; durations are in nanoseconds, ``prompt_eval_count`` counts tokens."""

    model: str
    embeddings: list[msgspec.Raw]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


async def respond_embed(call: Call[EmbedRequest, PoolJob]) -> HttpResponse:
    """Embed. Errors: as ``pool``. Cancellation: at once."""
    vectors, tokens = await _embed(call)
    timings = call.context.timings
    return await call.encode(
        lambda: HttpResponse.json(
            EmbedResponse(
                model=call.wire.model or call.model.name,
                embeddings=list(map(VectorEncoding().json, vectors)),
                total_duration=round(timings.total_s * 1e9),
                load_duration=round(timings.load_s * 1e9),
                prompt_eval_count=tokens,
            )
        ),
        rows=len(vectors),
        nbytes=sum(vector.nbytes for vector in vectors),
    )


async def _embed(call: Call[Any, PoolJob]) -> tuple[list[Vectors], int]:
    """Return the vectors of a job, and the number of tokens."""
    job, dimensions = call.job, call.model.dimensions
    call.model.require("embed")
    if not job.prompts:
        return [], 0
    if job.dimensions is not None and job.dimensions > dimensions:
        job = evolve(job, dimensions=None)
    pooled = await pool_limited(call, job, call.wire.num_ctx, name="options.num_ctx")
    return [vector for (vector,) in pooled.rows], pooled.prompt_tokens  # type: ignore[misc]


@frozen(kw_only=True)
class PromptRequest(OllamaRequest):
    """The body of ``/api/embeddings``."""

    prompt: str | None = None

    def job(self, _: int) -> PoolJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        return self.pool_job([self.prompt] if self.prompt else [], truncates=True, normalize=False)


@frozen(kw_only=True)
class PromptResponse:
    """A vector, not normalised; it is empty for an empty prompt."""

    embedding: msgspec.Raw


async def respond_embeddings(call: Call[PromptRequest, PoolJob]) -> HttpResponse:
    """Embed. Errors: as ``pool``. Cancellation: at once."""
    vectors, _ = await _embed(call)
    embedding = VectorEncoding().json(vectors[0]) if vectors else msgspec.Raw(b"[]")
    return HttpResponse.json(PromptResponse(embedding=embedding))


@frozen(kw_only=True)
class RerankRequest(OllamaRequest):
    """The body of ``/api/rerank``."""

    query: str
    documents: list[str]
    top_n: TopN | None = None

    def job(self, max_inputs: int) -> ScoreJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        self.require_valid()
        require_some(self.documents, max_inputs, param="documents")
        require_least(self.top_n)
        return ScoreJob(queries=[self.query], documents=self.documents, input_params=InputParams(truncate_to=-1))


@frozen(kw_only=True)
class RerankResponse:
    """The documents, best first."""

    model: str
    results: list[RerankResult]


async def respond_rerank(call: Call[RerankRequest, ScoreJob]) -> HttpResponse:
    """Rerank. Errors: as ``score``. Cancellation: at once."""
    if call.wire.num_ctx is not None:
        keep = min(call.wire.num_ctx, call.model.renderer.max_model_len)
        call = evolve(call, job=evolve(call.job, input_params=InputParams(truncate_to=keep)))
    return await respond_ranking(
        call,
        lambda _, results: RerankResponse(model=call.wire.model or call.model.name, results=results),
        top_n=call.wire.top_n,
        document=None,
    )


STATUSES = {422: 400, 429: 503, 507: 500}
"""Ollama's status, if it differs from the server's own."""


def error_body(error: WireError) -> tuple[int, Any]:
    """Return the status and the body of an error: clients know some of the messages by their beginnings."""
    status, body = string_error_body(error)
    match error.cause:
        case NotFoundError(model=str(name)):
            body = {"error": f"model '{name[:MAX_NAME]}' not found"}
        case ContextLengthError():
            body = {"error": f"the input length exceeds the context length: {error.message}"}
        case OverloadedError():
            body = {"error": f"server overloaded, please retry shortly: {error.message}"}
    return STATUSES.get(status, status), body


MODEL_SUFFIXES = (":latest",)
"""A name without a tag has this one in Ollama."""

MODEL, TEXTS = "org/model", ["A nursery owns its tasks.", "Every task has a parent."]
"""Examples."""

OLLAMA = Dialect(
    name="ollama",
    error_body=error_body,
    ignores_content_type=True,
    endpoints=(
        Endpoint(
            paths=("/api/embed",),
            model_suffixes=MODEL_SUFFIXES,
            wire=EmbedRequest,
            respond=respond_embed,
            field_names={"prompts": "input", "truncate_to": "truncate"},
            response=EmbedResponse,
            summary="Embed texts: one vector of unit length each.",
            example={"model": MODEL, "input": TEXTS},
        ),
        Endpoint(
            paths=("/api/embeddings",),
            model_suffixes=MODEL_SUFFIXES,
            wire=PromptRequest,
            respond=respond_embeddings,
            field_names={"prompts": "prompt", "truncate_to": "options"},
            response=PromptResponse,
            summary="Embed a text: one vector, not normalised.",
            example={"model": MODEL, "prompt": TEXTS[0]},
        ),
        Endpoint(
            paths=("/api/rerank",),
            model_suffixes=MODEL_SUFFIXES,
            wire=RerankRequest,
            respond=respond_rerank,
            field_names={"prompts": None, "queries": "query", "truncate_to": "options"},
            response=RerankResponse,
            summary="Sort documents by how well they fit a query.",
            example={"model": MODEL, "query": "What is a nursery?", "documents": TEXTS, "top_n": 1},
        ),
    ),
)
