"""Errors on the wire: the one table from error to status, and the body of each dialect."""

import logging
import math

import msgspec
from quart import Quart, Response, g
from werkzeug.exceptions import HTTPException

from trio_pool_serve import errors

logger = logging.getLogger(__name__)

TABLE: dict[type[errors.PoolServeError], tuple[int, str]] = {
    errors.InvalidRequestError: (400, "BadRequestError"),
    errors.AuthenticationError: (401, "AuthenticationError"),
    errors.NotFoundError: (404, "NotFoundError"),
    errors.MethodNotAllowedError: (405, "MethodNotAllowedError"),
    errors.BodyTimeoutError: (408, "RequestTimeoutError"),
    errors.PayloadTooLargeError: (413, "PayloadTooLarge"),
    errors.UnsupportedMediaTypeError: (415, "UnsupportedMediaType"),
    errors.OverloadedError: (429, "RateLimitError"),
    errors.UnavailableError: (503, "ServiceUnavailableError"),
    errors.DeadlineExceededError: (504, "DeadlineExceeded"),
    errors.PoolServeError: (500, "InternalServerError"),
}
"""Status and ``type``; a subclass of a listed error shares its row."""

MAX_MESSAGE = 1000
"""Characters; messages quote what clients sent, which may be megabytes."""

OF_HTTP_STATUS: dict[int, type[errors.PoolServeError]] = {
    404: errors.NotFoundError,
    405: errors.MethodNotAllowedError,
    408: errors.BodyTimeoutError,
    413: errors.PayloadTooLargeError,
}
"""What the framework raises by itself, in our terms."""


def register_error_handlers(app: Quart) -> None:
    """Answer every exception with a body in the dialect's shape."""
    app.register_error_handler(errors.PoolServeError, answer_error)
    app.register_error_handler(HTTPException, _answer_http_exception)
    app.register_error_handler(Exception, _answer_unexpected)


async def answer_error(error: errors.PoolServeError) -> Response:
    """Return the response for one of our own errors. Cancellation: does not wait for anything."""
    status, kind = next(TABLE[base] for base in type(error).__mro__ if base in TABLE)
    g.failed = True
    message = str(error)
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]}…"
    if status == 500:
        message += f" The request's id is {g.get('request_id', 'unknown')}."
    body = {
        "error": {
            "message": message,
            "type": kind,
            "param": getattr(error, "param", None),
            "code": status,
        }
    }
    response = Response(msgspec.json.encode(body), status=status, content_type="application/json")
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        response.headers["Retry-After"] = str(math.ceil(retry_after_s))
        response.headers["retry-after-ms"] = str(round(retry_after_s * 1000))
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


async def _answer_http_exception(error: HTTPException) -> Response:
    ours = OF_HTTP_STATUS.get(error.code or 500)
    if ours is None:
        return await _answer_unexpected(error)
    response = await answer_error(ours(error.description or str(error)))
    for name, value in error.get_headers():
        if name == "Allow":
            response.headers[name] = value
    return response


async def _answer_unexpected(error: Exception) -> Response:
    """Answer what nobody foresaw: the log gets everything, the client an id to ask about."""
    logger.error("request %s failed", g.get("request_id", "unknown"), exc_info=error)
    return await answer_error(errors.PoolServeError("Internal error."))
