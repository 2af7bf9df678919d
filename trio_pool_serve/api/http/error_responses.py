"""Error responses: the one table from error to status. Each dialect writes the bodies of its own."""

import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from werkzeug.exceptions import HTTPException

from trio_pool_serve import errors
from trio_pool_serve.api.http.endpoint import Dialect, DialectEndpoint, WireError
from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.response import HttpResponse

logger = logging.getLogger(__name__)

TABLE: dict[type[errors.PoolServeError], tuple[int, str]] = {
    errors.InvalidRequestError: (400, "BadRequestError"),
    errors.AuthenticationError: (401, "AuthenticationError"),
    errors.QuotaExceededError: (403, "QuotaExceededError"),
    errors.PermissionDeniedError: (403, "PermissionDeniedError"),
    errors.NotFoundError: (404, "NotFoundError"),
    errors.MethodNotAllowedError: (405, "MethodNotAllowedError"),
    errors.ConflictError: (409, "ConflictError"),
    errors.BodyTimeoutError: (408, "RequestTimeoutError"),
    errors.PayloadTooLargeError: (413, "PayloadTooLarge"),
    errors.UnsupportedMediaTypeError: (415, "UnsupportedMediaType"),
    errors.MediaError: (422, "UnprocessableEntityError"),
    errors.OverloadedError: (429, "RateLimitError"),
    errors.UnavailableError: (503, "ServiceUnavailableError"),
    errors.DeadlineExceededError: (504, "DeadlineExceeded"),
    errors.StorageInUseError: (503, "ServiceUnavailableError"),
    errors.StorageError: (507, "InsufficientStorageError"),
    errors.OutOfDeviceMemoryError: (507, "InsufficientMemoryError"),
    errors.PoolServeError: (500, "InternalServerError"),
}
"""Status and ``type``; a subclass of a listed error has its row."""

MAX_MESSAGE = 1000
"""Characters of a message; messages quote values of requests, which may be megabytes long."""


TYPES = dict(TABLE.values())


def describe(error: Exception, request_id: str, endpoint: DialectEndpoint | None = None, wire: Any = None) -> WireError:
    """Return an error as the client may see it. Unexpected ones are logged; the client sees the request's id only.

    The messages of errors of storage and of adapters contain paths, so they are logged, too. Fields have the names of
    the ``endpoint`` that ``wire`` was decoded for.
    """
    if isinstance(error, HTTPException) and error.code is not None:  # of Quart, or of a route that a user has added
        kind = TYPES.get(error.code, type(error).__name__)
        return WireError(error.code, kind, error.description or error.name, None, request_id)
    if not isinstance(error, errors.PoolServeError):
        logger.error("request %s failed", request_id, exc_info=error)
        error = errors.PoolServeError("Internal error.")
    status, kind = next(TABLE[base] for base in type(error).__mro__ if base in TABLE)
    message, param = str(error), error.param if isinstance(error, errors.InputError) else None
    if isinstance(error, errors.StorageError | errors.AdapterError):
        logger.warning("request %s: %s", request_id, error)
        message = error.shown
    if isinstance(error, errors.InputError) and endpoint is not None:
        name_of = partial(endpoint.endpoint.name_of, wire=wire)
        message, param = error.message_with(name_of), error.param_with(name_of)
    message = message.encode(errors="replace").decode()  # a chat template can raise lone surrogates
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]}…"
    if status == 500:
        message += f" The request's id is {request_id}."
    return WireError(status, kind, message, param, request_id, error)


def error_body(described: WireError, dialects: Sequence[Dialect]) -> tuple[int, dict[str, Any]]:
    """Return the status and the JSON body of an error, in a dialect or in several at once: then with the fields of all.

    The last one's status counts, and its fields where several have the same.
    """
    body: dict[str, Any] = {}
    for dialect in dialects:
        status, fields = dialect.error_body(described)
        body |= fields
    return status, body


def error_response(error: Exception, request: HttpRequest, dialects: Sequence[Dialect]) -> HttpResponse:
    """Return the response to a request that failed; several dialects are written as ``error_body`` does."""
    status, body = error_body(describe(error, request.request_id, request.claimed_by, request.wire), dialects)
    headers = {}
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(retry_after_s))
        headers["retry-after-ms"] = str(round(retry_after_s * 1000))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, errors.MethodNotAllowedError):
        headers["allow"] = error.allowed
    return HttpResponse.json(body, status).with_headers(headers)
