"""The request of one line of a batch, and its response."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import msgspec
from attrs import Factory, frozen

from trio_pool_serve.access.api_keys import KeyUsage
from trio_pool_serve.types import Client


@frozen
class Submitter:
    """Whose lines are computed, the names of the models that they may use (``None``: all), and who counts tokens."""

    client: Client = Factory(lambda: Client(is_background=True))
    models: frozenset[str] | None = None
    usage: KeyUsage | None = None


class LineRequest(msgspec.Struct, frozen=True):
    """A request to a route, as it would arrive over HTTP: the ``body`` is JSON.

    ``request_id`` and ``created`` (seconds since the epoch) are those that the response will have.
    """

    path: str
    body: bytes
    request_id: str
    created: int


class LineResponse(msgspec.Struct, frozen=True):
    """A response: its status, its body (JSON), and the tokens that were computed for it.

    ``is_json`` is False if the route has responded with something else, and this is the error that says so.
    """

    status: int
    body: bytes
    tokens: int = 0
    is_json: bool = True


RespondAll: TypeAlias = Callable[[Sequence[LineRequest], Submitter], Awaitable[list[LineResponse]]]
"""Returns the responses to the lines of one window, in their order.

The lines of one window are computed together, and with no others: the bytes of the responses depend on the window and
on the model, not on what else is computed. Raises ``UnavailableError`` if the server cannot compute now; all other
errors are responses. Cancellation: at once; nothing of the window stays in the queue.
"""
