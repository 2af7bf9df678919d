"""One HTTP request, as middleware and handlers see it."""

import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias, TypeVar
from urllib.parse import parse_qsl

import msgspec
import trio
from attrs import Factory, define, field, frozen

from trio_pool_serve.access.api_keys import KeyUsage
from trio_pool_serve.access.key_file import ApiKey
from trio_pool_serve.api.http.endpoint import DialectEndpoint
from trio_pool_serve.api.http.json_body import decode_json, wrong_value
from trio_pool_serve.api.http.request_body import BodyPieces, RequestBody
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.errors import (
    InvalidRequestError,
    PermissionDeniedError,
    UnsupportedMediaTypeError,
)
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.types import Client

Fields = TypeVar("Fields")

MAX_QUERY_FIELDS = 32

MAX_REQUEST_ID = 128
"""Characters of a client's request id that are sent back."""


WAITED_S = "trio_pool_serve.waited_s"
"""The ASGI extension of a server that knows how many seconds ago a request had arrived when it was read."""

FORWARDED = "trio_pool_serve.forwarded"
"""The ASGI extension of requests that another process of this server has received."""

CLIENT_LEFT = "the client has disconnected"


@define(eq=False)
class HttpRequest:
    """A request, and facts that become known while it is handled.

    ``scope`` is ASGI's; ``path`` is the path without the root path. ``request_id`` is the client's ``X-Request-Id``, or
    a new one: a label only, never a key. ``claimed_by`` is the endpoint that the body was decoded for, and ``wire`` the
    decoded body, once they are known. ``deadline`` is in the trio clock's seconds. Only the timings of a request with
    ``is_task`` are reported. ``client`` is known once the middleware has authenticated the request, and so is ``key``
    if it has one.
    """

    scope: Mapping[str, Any]
    path: str
    max_body_bytes: int
    created: int = field(factory=lambda: int(time.time()), init=False)
    """Time of the request, in seconds since the epoch, for responses that contain it."""
    headers: Mapping[bytes, bytes] = field(
        init=False, default=Factory(lambda self: dict(reversed(self.scope["headers"])), takes_self=True)
    )
    """The first header of each name."""
    body: RequestBody = field(init=False)
    pieces: BodyPieces | None = field(init=False, default=None)
    """The body of a request whose handler is a ``StreamingHandler``."""
    request_id: str = field(init=False)
    claimed_by: DialectEndpoint | None = None
    wire: Any = None
    timings: RequestTimings = field(
        init=False,
        default=Factory(
            lambda self: RequestTimings(self.scope.get("extensions", {}).get(WAITED_S, 0.0)), takes_self=True
        ),
    )
    """Timings since the request arrived."""
    deadline: float = math.inf
    is_task: bool = False
    client: Client = field(init=False, default=Client())
    key: ApiKey | None = field(init=False, default=None)
    models: frozenset[str] | None = field(init=False, default=None)
    """Names of the models that the request may use, ``None`` for all."""
    at_end: list[Callable[[], object]] = field(init=False, factory=list)
    """Functions to call once the response has been sent: they release memory, and stop counting the request."""
    route: str = field(init=False, default="")
    """The path of the route, with ``{name}`` for a variable part."""
    model: str | None = field(init=False, default=None)
    """Name of the model that computes the request."""
    fingerprint: str = field(init=False, default="")
    """The model's fingerprint, once there is a response."""
    status: int | None = field(init=False, default=None)
    """The status of the response, once there is one."""
    error: Exception | None = field(init=False, default=None)
    """The error that was answered."""
    span: Any = field(init=False, default=None)
    """OpenTelemetry's span, if requests are traced."""
    cancel_reason: str | None = field(init=False, default=None)
    """The reason why the request was not answered: ``CLIENT_LEFT`` if its client disconnected before."""

    @body.default
    def _empty_body(self) -> RequestBody:
        # How a body is framed counts for more than the length that is announced.
        length = b"" if b"transfer-encoding" in self.headers else self.headers.get(b"content-length", b"")
        return RequestBody(int(length) if length.isdigit() else None, self.max_body_bytes)

    @request_id.default
    def _chosen_id(self) -> str:
        given = self.header(b"x-request-id") or ""
        is_shown = given and given.isascii() and given.isprintable()
        # Ids are no secrets, and a system call for each is saved.
        return given[:MAX_REQUEST_ID] if is_shown else f"{random.getrandbits(128):032x}"

    def apply_limits(self, usage: KeyUsage) -> None:
        """Apply the limits of the request's key. Raises ``OverloadedError``."""
        usage.enter(trio.current_time())
        self.at_end.append(usage.leave)
        if self.key is not None and self.key.max_body_bytes is not None:
            self.body.lower_limit(self.key.max_body_bytes)
        if usage.tokens.per_minute:
            self.timings.on_tokens = usage.take_tokens

    def require_name(self, name: str, *aliases: str) -> None:
        """Raise ``PermissionDeniedError`` if the request's key may use none of the names of a model to be loaded."""
        if self.models is not None and self.models.isdisjoint((name, *aliases)):
            raise PermissionDeniedError(f"The API key may not use a model `{name}`.")

    def end(self) -> None:
        """Call the functions ``at_end``, each once."""
        while self.at_end:
            self.at_end.pop()()

    def header(self, name: bytes) -> str | None:
        """Return a header by its name in lower case; the first, if there are several."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin1")

    def require_json_type(self) -> None:
        """Raise ``UnsupportedMediaTypeError`` if the request declares a body that is not JSON."""
        mimetype = (self.header(b"content-type") or "").partition(";")[0].strip().lower()
        if mimetype and mimetype != "application/json" and not mimetype.endswith("+json"):
            raise UnsupportedMediaTypeError(f"Send the body as application/json, not {mimetype[:100]}.")

    async def json(self, kind: type[Fields], max_bytes: int, timeout_s: float) -> Fields:
        """Return the fields of a small JSON body, for routes of no dialect; unknown ones are ignored.

        Raises ``InvalidRequestError``, ``BodyTimeoutError`` and ``PayloadTooLargeError``. Cancellation: at once.
        """
        return decode_json(await self.body.take_small(max_bytes, timeout_s), kind)

    def query(self, kind: type[Fields]) -> Fields:
        """Return the fields of the query string; unknown ones are ignored. Raises ``InvalidRequestError``."""
        try:
            fields = dict(parse_qsl(self.scope["query_string"].decode("latin1"), max_num_fields=MAX_QUERY_FIELDS))
            return msgspec.convert(fields, kind, strict=False)
        except msgspec.ValidationError as error:
            raise wrong_value(error, b"", kind) from error
        except ValueError as error:
            raise InvalidRequestError(f"The query is not valid: {error}.") from error

    @property
    def owner(self) -> str:
        """The name of the request's key; empty without keys. Files and batches are its own."""
        return "" if self.key is None else self.key.name

    @property
    def is_forwarded(self) -> bool:
        """Whether another process of this server received it, and counts it for its key."""
        return FORWARDED in self.scope.get("extensions", {})

    @property
    def is_bodiless_get(self) -> bool:
        """Whether all of the request has arrived with its head: a GET after which no body follows."""
        declared = b"content-length" in self.headers or b"transfer-encoding" in self.headers
        return self.scope["method"] == "GET" and self.scope["http_version"] < "2" and not declared


Handler: TypeAlias = Callable[[HttpRequest], Awaitable[HttpResponse]]
"""Returns the response to a request of one route."""


@frozen(eq=False)
class StreamingHandler:
    """A handler whose requests have bodies that may not fit in memory: it iterates over ``request.pieces``."""

    respond: Handler

    async def __call__(self, request: HttpRequest) -> HttpResponse:
        """Return the response. Cancellation: as ``respond``."""
        return await self.respond(request)
