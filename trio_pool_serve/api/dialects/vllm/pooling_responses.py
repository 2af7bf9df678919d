"""Responses of ``/pooling``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias, TypeVar

import msgspec
from attrs import frozen

from trio_pool_serve.api.fields.embedding_responses import Usage, VectorEncoding, encode_bytes
from trio_pool_serve.api.fields.encodings import sparse_json
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.tasks.pool import Pooled, PooledRow
from trio_pool_serve.types import PooledValue, SparseVector, Vectors

T = TypeVar("T")

PerTask: TypeAlias = T | Mapping[str, T]
"""The one task's value, or values by task if the request has ``tasks``."""


@frozen(kw_only=True)
class PoolingItem:
    """The values of one text.

    ``data`` is an array of numbers for the text, an array of those for each of its tokens, base64 of either, or
    an array of ``{"index", "value"}``. ``shape`` is there with base64 that holds an array for each token.
    """

    index: int
    data: PerTask[msgspec.Raw]
    shape: PerTask[list[int]] | msgspec.UnsetType = msgspec.UNSET
    object: Literal["pooling"] = "pooling"


@frozen(kw_only=True)
class PoolingResponse:
    """The response of ``/pooling``."""

    id: str
    created: int
    model: str
    data: list[PoolingItem]
    usage: Usage
    object: Literal["list"] = "list"


def encode_pooled(
    pooled: Pooled,
    tasks: Sequence[str],
    encoding: VectorEncoding,
    *,
    by_task: bool,
    response_id: str,
    model: str,
    created: int,
) -> HttpResponse:
    """Return the response: JSON, or the bytes of one task's arrays one after the other.

    ``tasks`` are those of the rows; with ``by_task`` the values are given by task.
    """
    usage = Usage.of(pooled.prompt_tokens)
    if encoding.format in ("bytes", "bytes_only"):
        arrays: list[Vectors] = [array for (array,) in pooled.rows]  # type: ignore[misc]
        return encode_bytes(arrays, encoding, usage=usage, response_id=response_id, model=model, created=created)

    def per_task(row: PooledRow, of: Callable[[PooledValue], T]) -> PerTask[T]:
        return dict(zip(tasks, map(of, row), strict=True)) if by_task else of(row[0])

    def item(index: int, row: PooledRow) -> PoolingItem:
        data = per_task(row, lambda value: _json(value, encoding))
        if encoding.format != "base64" or all(_is_flat(value) for value in row):
            return PoolingItem(index=index, data=data)
        return PoolingItem(index=index, data=data, shape=per_task(row, _shape))

    items = [item(index, row) for index, row in enumerate(pooled.rows)]
    response = PoolingResponse(id=response_id, created=created, model=model, data=items, usage=usage)
    return HttpResponse.json(response)


def _json(value: PooledValue, encoding: VectorEncoding) -> msgspec.Raw:
    return msgspec.Raw(sparse_json(value)) if isinstance(value, SparseVector) else encoding.json(value)


def _is_flat(value: PooledValue) -> bool:
    return isinstance(value, SparseVector) or value.ndim == 1


def _shape(value: PooledValue) -> list[int]:
    return [len(value.indices)] if isinstance(value, SparseVector) else list(value.shape)
