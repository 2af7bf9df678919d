"""What a job's request is to the server, whatever it asks for."""

import math

from attrs import Factory, frozen

from trio_pool_serve.engine.admission import EstimatedWork
from trio_pool_serve.rendering.memory_budget import MemoryBudget, Reservation
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.types import Client


@frozen(eq=False)
class RequestContext:
    """Who sends a request, until when its answer is of use (the trio clock's seconds), and how long it takes.

    ``reservation`` is of the memory that it holds.
    """

    timings: RequestTimings = Factory(RequestTimings)
    client: Client = Factory(Client)
    deadline: float = math.inf
    reservation: Reservation = Factory(lambda self: Reservation(MemoryBudget(), self.client), takes_self=True)

    def work(self, tokens: int, rows: int = 1, *, priority: int = 0, has_images: bool = False) -> EstimatedWork:
        """Return what the request asks of the engine."""
        return EstimatedWork(
            tokens=tokens,
            rows=rows,
            has_images=has_images,
            client=self.client,
            priority=priority,
            deadline=self.deadline,
            waited_s=self.timings.waited_s,
        )
