"""A dialect: its endpoints, and how it writes errors."""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
from attrs import Factory, define, field, frozen

from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.errors import JobField
from trio_pool_serve.service import Service
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.tasks.request_context import RequestContext

Wire = TypeVar("Wire")
Job = TypeVar("Job")

LOOP_BYTES = 16 * 1024
"""Maximum size of bodies and responses that are decoded and encoded on the loop. Texts and base64 take less time
than a thread hop then, token ids and decimal numbers about two (``docs/structure.md``)."""

LOOP_ROWS = 64
"""Maximum rows of a response that is encoded on the loop, however short the rows: each costs a few microseconds."""

FieldNames: TypeAlias = Mapping[JobField, str | tuple[str, ...] | None]
"""The client's names of a job's fields. Of several names, the first one in the request is used, or else the last;
``None`` is for a field that is made from several. A field that is missing here has the same name."""


@define(eq=False, kw_only=True)
class Call(Generic[Wire, Job]):
    """One decoded request to an endpoint: all that its response is made from.

    ``context`` has the facts about the request that tasks need; ``created`` is in seconds since the epoch.
    """

    wire: Wire
    job: Job
    model: Model
    service: Service
    context: RequestContext
    request_id: str
    claimed_by: "DialectEndpoint"
    created: int
    model_suffix: str = ""

    def response_id(self, prefix: str) -> str:
        """Return the id of the response: the ``request_id`` in the body, or else the request's own."""
        return f"{prefix}{getattr(self.wire, 'request_id', None) or self.request_id}"

    async def encode(self, encoder: Callable[[], HttpResponse], *, rows: int, nbytes: int) -> HttpResponse:
        """Return ``encoder()``, called in a thread unless the response is small.

        ``rows`` and ``nbytes`` are the size of the arrays that are written. Cancellation: while waiting for a thread,
        at once; an encoder that has begun is finished.
        """
        began = time.perf_counter()
        is_small = rows <= LOOP_ROWS and nbytes <= LOOP_BYTES
        response = encoder() if is_small else await self.service.offload.run("postprocess", encoder)
        self.context.timings.encode_s = time.perf_counter() - began
        self.service.metrics.encode.observe(self.context.timings.encode_s)
        return response


@frozen(eq=False)
class WireError:
    """An error as the table of statuses describes it; each dialect has its own body for it.

    ``status`` is the HTTP status, ``type`` the name that OpenAI's dialect gives it, ``cause`` the error itself.
    """

    status: int
    type: str
    message: str
    param: str | None
    request_id: str
    cause: Exception | None = None


def string_error_body(error: WireError) -> tuple[int, Any]:
    """Return the status and a body that has nothing but the message, as several products write their errors."""
    return error.status, {"error": error.message}


@frozen(eq=False, kw_only=True)
class Endpoint(Generic[Wire, Job]):
    """One route of a dialect.

    Dialects may share a path: a request belongs to the first endpoint that has one of its fields, null or not, among
    ``discriminators``, or else to the endpoint without discriminators.

    ``wire`` is the attrs class of the request's body; its field ``model`` chooses the model. ``to_job``, by default
    its method ``job``, makes the task's job of it, in a thread if the body is large, and raises
    ``InvalidRequestError``. Clients may append one of ``model_suffixes`` to the name of a model; ``Call.model_suffix``
    is the one in the request. ``respond`` does the job and returns the response. ``example`` is a request, and
    ``summary`` a line, for ``/openapi.json``; ``response`` is the attrs class of the response, if that is a JSON
    object.
    """

    paths: tuple[str, ...]
    wire: type[Wire]
    respond: Callable[[Call[Wire, Job]], Awaitable[HttpResponse]]
    summary: str
    example: Mapping[str, Any]
    discriminators: frozenset[str] = frozenset()
    model_suffixes: tuple[str, ...] = ()
    field_names: FieldNames = field(factory=dict)
    response: type[Any] | None = None
    to_job: Callable[[Wire, int], Job] = Factory(lambda self: self.wire.job, takes_self=True)

    def __attrs_post_init__(self) -> None:
        # msgspec works out a class at its first use, and notes it before it has finished. A second thread that decodes
        # to the class meanwhile ends the process by a segmentation fault.
        msgspec.json.Decoder(self.wire)

    def name_of(self, job_field: JobField, wire: Wire | None) -> str | None:
        """Return the name by which the client that sent ``wire``, if it could be decoded, knows a job's field."""
        names = self.field_names.get(job_field, job_field)
        if names is None or isinstance(names, str):
            return names
        return next((name for name in names if getattr(wire, name, None) is not None), names[-1])


@frozen(eq=False, kw_only=True)
class Dialect:
    """The wire format that the clients of one product use."""

    name: str
    endpoints: tuple[Endpoint[Any, Any], ...]
    error_body: Callable[[WireError], tuple[int, Any]]
    """Returns the status and the JSON body of an error."""
    ignores_content_type: bool = False
    """Whether a body may have any ``Content-Type``; by default it must be JSON, or not declared."""


@frozen(eq=False)
class DialectEndpoint:
    """An endpoint and its dialect; ``foreign`` are the fields that only other endpoints of the path have."""

    dialect: Dialect
    endpoint: Endpoint[Any, Any]
    foreign: frozenset[str] = frozenset()
