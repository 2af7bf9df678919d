"""Errors on the wire: the one table from error to status, written by the dialect of the route."""

import logging
import math
from collections.abc import Sequence
from typing import Any

from trio_pool_serve import errors
from trio_pool_serve.api.http.answer import Answer
from trio_pool_serve.api.http.endpoint import Dialect, WireError

logger = logging.getLogger(__name__)

TABLE: dict[type[errors.PoolServeError], tuple[int, str]] = {
    errors.InvalidRequestError: (400, "BadRequestError"),
    errors.AuthenticationError: (401, "AuthenticationError"),
    errors.NotFoundError: (404, "NotFoundError"),
    errors.MethodNotAllowedError: (405, "MethodNotAllowedError"),
    errors.BodyTimeoutError: (408, "RequestTimeoutError"),
    errors.PayloadTooLargeError: (413, "PayloadTooLarge"),
    errors.UnsupportedMediaTypeError: (415, "UnsupportedMediaType"),
    errors.MediaError: (422, "UnprocessableEntityError"),
    errors.OverloadedError: (429, "RateLimitError"),
    errors.UnavailableError: (503, "ServiceUnavailableError"),
    errors.DeadlineExceededError: (504, "DeadlineExceeded"),
    errors.PoolServeError: (500, "InternalServerError"),
}
"""Status and ``type``; a subclass of a listed error shares its row."""

MAX_MESSAGE = 1000
"""Characters; messages quote what clients sent, which may be megabytes."""


def describe(error: Exception, request_id: str) -> WireError:
    """Return what clients are told about an error; the log gets the rest of what nobody foresaw."""
    if not isinstance(error, errors.PoolServeError):
        logger.error("request %s failed", request_id, exc_info=error)
        error = errors.PoolServeError("Internal error.")
    status, kind = next(TABLE[base] for base in type(error).__mro__ if base in TABLE)
    message = str(error).encode(errors="replace").decode()  # a chat template can say lone surrogates
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]}…"
    if status == 500:
        message += f" The request's id is {request_id}."
    return WireError(
        status,
        kind,
        message,
        getattr(error, "param", None),
        request_id,
        is_empty_input=isinstance(error, errors.EmptyInputError),
        is_unsupported_task=isinstance(error, errors.TaskNotSupportedError),
    )


def write_error(error: WireError, dialects: Sequence[Dialect]) -> tuple[int, Any]:
    """Return status and body in a dialect; if any of several may be the client's, with the fields of all.

    The last one's status counts, and its fields do where others have the same.
    """
    written = [dialect.error_body(error) for dialect in dialects]
    return written[-1][0], {name: value for _, body in written for name, value in body.items()}


def answer_error(error: Exception, request_id: str, dialects: Sequence[Dialect]) -> Answer:
    """Return what a client is told about an error, in a dialect or in several at once."""
    status, body = write_error(describe(error, request_id), dialects)
    headers = {}
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(retry_after_s))
        headers["retry-after-ms"] = str(round(retry_after_s * 1000))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Answer.json(body, status).also_saying(headers)
