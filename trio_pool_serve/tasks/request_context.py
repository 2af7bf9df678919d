"""The client, deadline and resources of a request of any job, and its accounting once it is admitted."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

from attrs import Factory, frozen

from trio_pool_serve.engine.admission import AdmittedRequest, EstimatedWork
from trio_pool_serve.rendering.memory_budget import MemoryBudget, Reservation
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.types import Client, PoolingOutput, PoolingRequest, RenderedPrompt


@frozen(eq=False)
class RequestContext:
    """The client of a request, its deadline in seconds of trio's clock, its timings and its memory."""

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


@frozen(eq=False)
class RequestAccounting(AbstractContextManager["RequestAccounting"]):
    """Updates admission, the memory budget and the timings at each step of a request's rows; a context manager."""

    admitted: AdmittedRequest
    memory: MemoryBudget
    timings: RequestTimings

    def __exit__(self, *_: object) -> None:
        self.admitted.release()

    def note_rendered(self, rows: Sequence[Sequence[RenderedPrompt]], render_s: float) -> None:
        """Replace the estimate of rows by their lengths, ``render_s`` seconds after rendering began."""
        self.timings.render_s = render_s
        self.admitted.note_rendered((prompt for prompts in rows for prompt in prompts), len(rows))

    def computing(self, requests: Sequence[PoolingRequest]) -> AbstractContextManager[None]:
        """Count rows as submitted; their arrays count as memory until the context ends."""
        self.timings.add_rendered(rows=len(requests), tokens=sum(request.tokens for request in requests))
        return self.memory.holding((request.prompt for request in requests), self.admitted.work.client)

    def note_computed(self, prompts: Sequence[RenderedPrompt], outputs: Sequence[PoolingOutput]) -> None:
        """Count rows of a batch as computed, and add their durations."""
        self.timings.add_rows(outputs)
        for prompt in prompts:
            self.admitted.note_computed(prompt)
