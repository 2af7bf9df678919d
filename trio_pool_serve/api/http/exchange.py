"""One HTTP request on its way to an answer, whichever way its route was found."""

import math
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from attrs import define, field

from trio_pool_serve.api.http.answer import Answer
from trio_pool_serve.api.http.endpoint import Dialect
from trio_pool_serve.api.http.received_body import ReceivedBody
from trio_pool_serve.telemetry.timings import RequestTimings

MAX_REQUEST_ID = 128
"""Characters of a client's id that are echoed."""


@define(eq=False)
class Exchange:
    """What is known of a request, and of its answer so far.

    ``scope`` is ASGI's; ``path`` is the one that routes have: without the root path. ``request_id`` is the client's
    ``X-Request-Id``, or a new one: a label only, never a key. ``dialect`` is there once one knows whose the request
    is. ``deadline`` is in the trio clock's seconds. Of those that ask for a task, and no others, timings are told.
    """

    scope: Mapping[str, Any]
    path: str
    body: ReceivedBody
    headers: Mapping[bytes, bytes] = field(init=False)
    request_id: str = field(init=False)
    dialect: Dialect | None = None
    timings: RequestTimings = field(factory=RequestTimings)
    deadline: float = math.inf
    asks_for_task: bool = False

    @headers.default
    def _first_of_each(self) -> Mapping[bytes, bytes]:
        return dict(reversed(self.scope["headers"]))

    @request_id.default
    def _chosen_id(self) -> str:
        given = self.header(b"x-request-id") or ""
        printable = given.isascii() and given.isprintable()
        return given[:MAX_REQUEST_ID] if given and printable else uuid.uuid4().hex

    def header(self, name: bytes) -> str | None:
        """Return a header by its name in lower case; the first, if there are several."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin1")

    @property
    def ends_with_its_head(self) -> bool:
        """Whether all of the request has arrived: no body follows."""
        declared = b"content-length" in self.headers or b"transfer-encoding" in self.headers
        return self.scope["method"] == "GET" and self.scope["http_version"] < "2" and not declared

    @property
    def mimetype(self) -> str:
        """The content type without its parameters; empty if there is none."""
        return (self.header(b"content-type") or "").partition(";")[0].strip().lower()


Handler: TypeAlias = Callable[[Exchange], Awaitable[Answer]]
"""Answers the requests of one route."""
