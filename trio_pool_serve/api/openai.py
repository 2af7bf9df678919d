"""The OpenAI dialect: ``/v1/embeddings`` and ``/v1/models``."""

import json
import time
from functools import partial
from typing import Literal, TypeAlias

import msgspec
import numpy as np
from attrs import Factory, field, frozen
from quart import Blueprint, Response, g

from trio_pool_serve.api.bodies import LOOP_BYTES, decode_json, read_body
from trio_pool_serve.api.encodings import EmbedDtype, Endianness, row_base64, row_bytes, row_json
from trio_pool_serve.api.requests import measured
from trio_pool_serve.errors import InvalidRequestError, NotFoundError
from trio_pool_serve.service import Service
from trio_pool_serve.tasks.embed import Embeddings, EmbedJob
from trio_pool_serve.types import Prompt, TextPrompt, TokensPrompt, TruncationSide, Vectors

EncodingFormat: TypeAlias = Literal["float", "base64", "bytes", "bytes_only"]

MAX_METADATA_BYTES = 4096
"""Past this a ``metadata`` header would be refused by proxies and clients."""

MAX_METADATA_ROWS = 64
"""Each vector takes more than 64 bytes there."""

LOOP_ROWS = 64
"""Answers of more vectors are encoded in a thread however short those are: each costs a few microseconds."""


@frozen(kw_only=True)
class EmbeddingsRequest:
    """The body of ``/v1/embeddings``. Every optional field may be null."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: EncodingFormat | None = None
    embed_dtype: EmbedDtype | None = None
    endianness: Endianness | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide | None = None
    add_special_tokens: bool | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    normalize: bool | None = None
    user: str | None = None
    priority: int | None = None
    request_id: str | None = None

    def job(self, *, max_inputs: int) -> EmbedJob:
        """Return what is asked, in the task's terms. Raises ``InvalidRequestError``."""
        prompts = prompts_of(self.input)
        if len(prompts) > max_inputs:
            raise InvalidRequestError(f"{len(prompts)} inputs are more than {max_inputs}.", param="input")
        return EmbedJob(
            prompts=prompts,
            truncate_to=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side or "right",
            add_special_tokens=self.add_special_tokens is not False,
            prompt_name=self.prompt_name,
            instruction=self.prompt,
            dimensions=self.dimensions,
            normalize=self.normalize,
            priority=self.priority or 0,
        )


@frozen(kw_only=True)
class EmbeddingItem:
    """One vector of an answer."""

    index: int
    embedding: msgspec.Raw
    object: Literal["embedding"] = "embedding"


@frozen(kw_only=True)
class Usage:
    """Tokens read; embeddings produce none, so both counts are the same."""

    prompt_tokens: int
    total_tokens: int = field(init=False, default=Factory(lambda self: self.prompt_tokens, takes_self=True))


@frozen(kw_only=True)
class EmbeddingsResponse:
    """The answer of ``/v1/embeddings``."""

    id: str
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: Usage
    object: Literal["list"] = "list"


@frozen(kw_only=True)
class ModelCard:
    """One entry of ``/v1/models``."""

    id: str
    created: int
    root: str
    max_model_len: int
    task: str = "embed"
    owned_by: str = "trio_pool_serve"
    object: Literal["model"] = "model"


@frozen(kw_only=True)
class ModelList:
    """The answer of ``/v1/models``."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


def prompts_of(asked: str | list[str | int | list[int]]) -> list[Prompt]:
    """Tell apart the four forms of ``input``: a text, texts, token ids, lists of token ids."""
    if isinstance(asked, str):
        return [TextPrompt(asked)]
    if not asked:
        raise InvalidRequestError("input is empty.", param="input")
    kinds = set(map(type, asked))
    if len(kinds) > 1:
        raise InvalidRequestError("input mixes texts and token ids.", param="input")
    (kind,) = kinds
    if kind is str:
        return [TextPrompt(text) for text in asked]  # type: ignore[arg-type]
    if kind is int:
        return [_tokens_prompt(asked)]  # type: ignore[arg-type]
    return [_tokens_prompt(ids) for ids in asked]  # type: ignore[arg-type]


def _tokens_prompt(ids: list[int]) -> TokensPrompt:
    if not ids:
        raise InvalidRequestError("An input has no tokens.", param="input")
    try:
        return TokensPrompt(np.array(ids, dtype=np.int64))
    except OverflowError as error:
        raise InvalidRequestError("A token id is too large to be one.", param="input") from error


def refuse_unencodable(wire: EmbeddingsRequest, *, rows: int, dimensions: int) -> None:
    """Raise ``InvalidRequestError`` for an answer that cannot be written as asked, before it is computed."""
    if wire.embed_dtype in ("binary", "ubinary") and dimensions % 8:
        raise InvalidRequestError(
            f"{wire.embed_dtype} needs a multiple of 8 dimensions, not {dimensions}.", param="embed_dtype"
        )
    if wire.encoding_format == "bytes" and rows > MAX_METADATA_ROWS:
        raise InvalidRequestError(
            f"The metadata of {rows} vectors does not fit into a header; ask for bytes_only.", param="encoding_format"
        )


def encode_embeddings(
    answer: Embeddings, wire: EmbeddingsRequest, *, answer_id: str, model: str
) -> tuple[bytes, str, dict[str, str]]:
    """Return an answer's body, content type and further headers."""
    encoding = wire.encoding_format or "float"
    dtype: EmbedDtype = wire.embed_dtype or "float32"
    endianness = wire.endianness or ("little" if encoding == "base64" else "native")
    created = int(time.time())
    usage = Usage(prompt_tokens=answer.prompt_tokens)
    if encoding in ("bytes", "bytes_only"):
        rows = [row_bytes(vector, dtype, endianness) for vector in answer.vectors]
        headers = {}
        if encoding == "bytes":
            headers["metadata"] = _bytes_metadata(
                rows,
                answer.vectors,
                dtype,
                endianness,
                usage=usage,
                created=created,
                answer_id=answer_id,
                model=model,
            )
        return b"".join(rows), "application/octet-stream", headers
    items = [
        EmbeddingItem(
            index=index,
            embedding=msgspec.Raw(
                row_json(vector, dtype) if encoding == "float" else row_base64(vector, dtype, endianness)
            ),
        )
        for index, vector in enumerate(answer.vectors)
    ]
    response = EmbeddingsResponse(id=answer_id, created=created, model=model, data=items, usage=usage)
    return msgspec.json.encode(response), "application/json", {}


def _bytes_metadata(
    rows: list[bytes],
    vectors: list[Vectors],
    dtype: EmbedDtype,
    endianness: Endianness,
    *,
    usage: Usage,
    created: int,
    answer_id: str,
    model: str,
) -> str:
    """Return where each vector lies in a body of concatenated ones, as ASCII JSON for a header."""
    data, start = [], 0
    for index, (row, vector) in enumerate(zip(rows, vectors, strict=True)):
        data.append(
            {
                "index": index,
                "embed_dtype": dtype,
                "endianness": endianness,
                "start": start,
                "end": start + len(row),
                "shape": [len(vector)],
            }
        )
        start += len(row)
    described = {"id": answer_id, "created": created, "model": model, "data": data, "usage": usage}
    metadata = json.dumps(msgspec.to_builtins(described), ensure_ascii=True, separators=(",", ":"))
    if len(metadata) > MAX_METADATA_BYTES:
        raise InvalidRequestError(
            f"The metadata of {len(rows)} vectors does not fit into a header; ask for bytes_only.",
            param="encoding_format",
        )
    return metadata


def openai_routes(service: Service) -> Blueprint:
    """Return the dialect's routes over a service."""
    routes = Blueprint("openai", __name__)
    network = service.config.network
    started = int(time.time())

    def parse(body: bytes) -> tuple[EmbeddingsRequest, EmbedJob]:
        wire = decode_json(body, EmbeddingsRequest, strict=network.strict_requests)
        return wire, wire.job(max_inputs=network.max_inputs_per_request)

    @routes.post("/v1/embeddings")
    @routes.post("/embeddings")
    @measured(service)
    async def embeddings() -> Response:
        wire, job = await read_body(parse, service.offload)
        service.require_model(wire.model)
        task = service.embed_task
        refuse_unencodable(wire, rows=len(job.prompts), dimensions=job.dimensions or service.engine.dimensions)
        answer = await task.embed(job, g.timings)
        encode = partial(
            encode_embeddings,
            answer,
            wire,
            answer_id=f"embd-{wire.request_id or g.request_id}",
            model=service.config.served_model_name,
        )
        began = time.perf_counter()
        if len(answer.vectors) <= LOOP_ROWS and sum(vector.nbytes for vector in answer.vectors) <= LOOP_BYTES:
            body, content_type, headers = encode()
        else:
            body, content_type, headers = await service.offload.run("postprocess", encode)
        g.timings.encode_s = time.perf_counter() - began
        service.metrics.encode.observe(g.timings.encode_s)
        return Response(body, content_type=content_type, headers=headers)

    def card() -> ModelCard:
        return ModelCard(
            id=service.config.served_model_name,
            created=started,
            root=service.config.model,
            max_model_len=service.embed_task.renderer.max_model_len,
        )

    @routes.get("/v1/models")
    async def models() -> Response:
        return _json(ModelList(data=[card()]))

    @routes.get("/v1/models/<path:name>")
    async def model(name: str) -> Response:
        if name != service.config.served_model_name:
            raise NotFoundError(f"The model {name!r} does not exist.")
        return _json(card())

    return routes


def _json(answer: object) -> Response:
    return Response(msgspec.json.encode(answer), content_type="application/json")
