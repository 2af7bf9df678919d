"""Responses to lines of requests: by the endpoints of the routes, without HTTP."""

from collections.abc import Sequence
from functools import partial

import msgspec
import trio
from attrs import Factory, define, evolve

from trio_pool_serve.api.http.endpoint import Call, Dialect
from trio_pool_serve.api.http.endpoint_choice import DecodedBody, model_named_by
from trio_pool_serve.api.http.error_responses import describe, error_body
from trio_pool_serve.api.http.json_body import is_quick_to_decode
from trio_pool_serve.api.http.request_body import SMALL_BYTES
from trio_pool_serve.api.http.route_table import PLACE, RouteTable
from trio_pool_serve.api.http.task_handler import TaskHandler
from trio_pool_serve.engine.planned_window import PlannedWindow, WindowMember
from trio_pool_serve.engine.process_placement import has_gpu
from trio_pool_serve.errors import (
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
    unwrap_exception_groups,
)
from trio_pool_serve.rendering.memory_budget import Reservation
from trio_pool_serve.runs.requests.line_results import LineRequest, LineResponse, Submitter
from trio_pool_serve.service import Service
from trio_pool_serve.tasks.request_context import RequestContext
from trio_pool_serve.telemetry.timings import RequestTimings

CPU_TOKEN_DIVISOR = 128
GPU_TOKEN_DIVISOR = 4
"""Divisors of the token budget of batches of lines: requests over HTTP wait while such a batch is computed."""


PAUSE_S = 0.003
"""Pause before another line is begun while there are requests: a line takes about 1 ms of the event loop."""


@define(eq=False)
class LineResponder:
    """Responds to lines by the tasks among ``routes``; errors of no dialect are written as ``default`` does.

    ``respond_all`` is a ``RespondAll``.
    """

    service: Service
    routes: RouteTable
    default: Dialect
    token_divisor: int = Factory(
        lambda self: GPU_TOKEN_DIVISOR if has_gpu(self.service.config.loading) else CPU_TOKEN_DIVISOR, takes_self=True
    )
    """Divisor of the engine's token budget, for batches of lines."""

    @property
    def paths(self) -> list[str]:
        """The paths that lines may name: all paths of tasks without a name in them."""
        return [
            path
            for (_, path), handler in self.routes.routes.items()
            if isinstance(handler, TaskHandler) and PLACE not in path
        ]

    async def respond_all(self, lines: Sequence[LineRequest], submitter: Submitter) -> list[LineResponse]:
        """Return the responses to the lines of one window, in their order; then their tokens count as used.

        Raises ``UnavailableError``. Cancellation: at once; nothing of the window stays in the queue.
        """
        responses: list[LineResponse | None] = [None] * len(lines)
        window = PlannedWindow(len(lines), self.token_divisor)

        async def respond(index: int, line: LineRequest) -> None:
            with window.members[index] as member:
                responses[index] = await self._respond(line, submitter, member)

        with unwrap_exception_groups(UnavailableError):
            async with trio.open_nursery() as nursery:
                for index, line in enumerate(lines):
                    nursery.start_soon(respond, index, line)
                    # All at once they would keep the event loop from other requests for a tenth of a second.
                    await trio.sleep(PAUSE_S if self.service.running_tasks else 0)
        done = [response for response in responses if response is not None]
        if submitter.usage is not None:
            submitter.usage.take_tokens(sum(response.tokens for response in done))
        return done

    async def _respond(self, line: LineRequest, submitter: Submitter, member: WindowMember) -> LineResponse:
        handler, decoded = self.handler_of(line.path), None
        timings = RequestTimings()
        reservation = Reservation(self.service.memory, submitter.client)
        context = RequestContext(timings, submitter.client, reservation=reservation)
        try:
            if handler is None:
                raise NotFoundError(f"No route {line.path} for the lines of a batch.")  # noqa: TRY301
            self.service.require_open()
            decoded = await self._decoded(handler, bytearray(line.body), context)
            if decoded.error is not None:
                raise decoded.error  # noqa: TRY301
            return await self._compute(decoded, line, submitter, member, context)
        except UnavailableError:
            raise
        except OverloadedError as error:  # other requests hold the memory: it is not the line's fault
            raise UnavailableError(str(error)) from error
        except Exception as error:
            known, wire = (None, None) if decoded is None else (decoded.claimed_by, decoded.wire)
            candidates = [known] if known is not None else [] if handler is None else handler.candidates
            dialects = [each.dialect for each in candidates] or [self.default]
            status, fields = error_body(describe(error, line.request_id, known, wire), dialects)
            is_json = not isinstance(error, _NotJsonError)
            return LineResponse(status, msgspec.json.encode(fields), timings.tokens, is_json)
        finally:
            reservation.release()

    async def _decoded(self, handler: TaskHandler, body: bytearray, context: RequestContext) -> DecodedBody:
        if len(body) > SMALL_BYTES:
            context.reservation.grow(len(body))
        if is_quick_to_decode(body):
            return handler.decode(body)
        return await self.service.offload.decode(context.client.number, partial(handler.decode, body))

    async def _compute(
        self,
        decoded: DecodedBody,
        line: LineRequest,
        submitter: Submitter,
        member: WindowMember,
        context: RequestContext,
    ) -> LineResponse:
        """Return the response. Raises ``_NotJsonError`` for one that cannot be part of a line."""
        models = self.service.models
        name, suffix = model_named_by(decoded, models, among=submitter.models)
        with models.use(name, among=submitter.models) as use:
            call = Call(
                wire=decoded.wire,
                job=decoded.job,
                model=evolve(await models.loaded(use), window=member),
                service=self.service,
                context=context,
                request_id=line.request_id,
                claimed_by=decoded.claimed_by,
                created=line.created,
                model_suffix=suffix,
            )
            response = await decoded.claimed_by.endpoint.respond(call)
        if not isinstance(response.body, bytes):
            raise _NotJsonError(
                "Leave out `stream`: the response to a line of a batch cannot be streamed.", param="stream"
            )
        if response.content_type != "application/json":
            raise _NotJsonError(
                f"The response to a line of a batch must be JSON, not {response.content_type}.", param="encoding_format"
            )
        return LineResponse(response.status, response.body, context.timings.tokens)

    def handler_of(self, path: str) -> TaskHandler | None:
        """Return the handler of a path that lines may name; ``None`` for other paths."""
        template = self.routes.template_of(self.routes.path_of_route(path))
        handler = None if PLACE in template else self.routes.find("POST", template)
        return handler if isinstance(handler, TaskHandler) else None


class _NotJsonError(InvalidRequestError):
    """The response to a request cannot be part of a line."""
