"""The client, deadline and resources of a request of any job."""

import math

from attrs import Factory, define

from trio_pool_serve.engine.admission import EstimatedWork
from trio_pool_serve.rendering.memory_budget import MemoryBudget, Reservation
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.types import Client


@define(eq=False)
class RequestContext:
    """The client of a request, its deadline in seconds of trio's clock, its timings and its memory.

    ``api/http/deadline.py`` computes the deadline of a request over HTTP.
    """

    timings: RequestTimings = Factory(RequestTimings)
    client: Client = Factory(Client)
    deadline: float = math.inf
    reservation: Reservation = Factory(lambda self: Reservation(MemoryBudget(), self.client), takes_self=True)

    def work(self, tokens: int, rows: int = 1, *, priority: int = 0, has_images: bool = False) -> EstimatedWork:
        """Return the request's work for the engine."""
        return EstimatedWork(
            tokens=tokens,
            rows=rows,
            has_images=has_images,
            client=self.client,
            priority=priority,
            deadline=self.deadline,
            waited_s=self.timings.waited_s,
        )
