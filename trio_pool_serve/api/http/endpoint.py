"""What a dialect is made of: endpoints, and how it writes errors."""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

from attrs import frozen

from trio_pool_serve.api.http.answer import Answer
from trio_pool_serve.api.http.bodies import LOOP_BYTES
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.service import Service
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.telemetry.timings import RequestTimings

Wire = TypeVar("Wire")
Job = TypeVar("Job")

LOOP_ROWS = 64
"""Answers of more rows are encoded in a thread however short those are: each costs a few microseconds."""


@frozen(eq=False, kw_only=True)
class Call(Generic[Wire, Job]):
    """One request to an endpoint, read and understood: everything its answer is made from.

    ``deadline`` is in the trio clock's seconds.
    """

    wire: Wire
    job: Job
    model: Model
    service: Service
    timings: RequestTimings
    request_id: str
    dialect: "Dialect"
    deadline: float

    async def encode(self, encoder: Callable[[], Answer], *, rows: int, nbytes: int) -> Answer:
        """Return the answer that ``encoder()`` writes, in a thread unless it is small.

        ``rows`` and ``nbytes`` are those of the arrays that are written. Cancellation: while waiting for a thread,
        at once; an encoder that runs is finished.
        """
        began = time.perf_counter()
        if rows <= LOOP_ROWS and nbytes <= LOOP_BYTES:
            answer = encoder()
        else:
            answer = await self.service.offload.run("postprocess", encoder)
        self.timings.encode_s = time.perf_counter() - began
        self.service.metrics.encode.observe(self.timings.encode_s)
        return answer


@frozen(eq=False)
class WireError:
    """An error, as the one table describes it; each dialect writes it in its own way.

    ``status`` is the HTTP status, ``type`` the name that OpenAI's dialect gives it.
    """

    status: int
    type: str
    message: str
    param: str | None
    request_id: str
    is_empty_input: bool = False
    is_unsupported_task: bool = False


ErrorBody: TypeAlias = Callable[[WireError], tuple[int, Any]]
"""Returns the status and the JSON body of an error."""


@frozen(eq=False, kw_only=True)
class Endpoint(Generic[Wire, Job]):
    """One route of a dialect.

    A path may be shared with other dialects: a request belongs to the first endpoint one of whose ``marks`` is
    among its fields, null or not, else to the one without marks.

    ``wire`` is the attrs class of the request's body; a field called ``model`` chooses the model. ``read`` makes
    the task's job of it, in a thread if the body is large, and raises ``InvalidRequestError``. ``answer`` has the
    job done. ``example`` is a request, and ``summary`` a line, for ``/openapi.json``.
    """

    paths: tuple[str, ...]
    wire: type[Wire]
    read: Callable[[Wire, NetworkConfig], Job]
    answer: Callable[[Call[Wire, Job]], Awaitable[Answer]]
    summary: str
    example: Mapping[str, Any]
    marks: frozenset[str] = frozenset()
    response: type[Any] | None = None
    """The attrs class of the answer, where it is a JSON object."""


@frozen(eq=False, kw_only=True)
class Dialect:
    """What the clients of one product speak."""

    name: str
    endpoints: tuple[Endpoint[Any, Any], ...]
    error_body: ErrorBody
