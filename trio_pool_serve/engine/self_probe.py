"""An engine's own probe: one row through its queue and device, at the start and whenever it has been idle."""

from collections.abc import Callable
from typing import NoReturn

import trio
from attrs import define, field

from trio_pool_serve.engine.engine import Submission, require_finite
from trio_pool_serve.engine.queue import RequestQueue
from trio_pool_serve.errors import PoolServeError
from trio_pool_serve.types import PoolingRequest


@define(eq=False)
class SelfProbe:
    """Computes ``request`` by putting it into ``queue``, which others take batches from; ``None``: computes nothing."""

    queue: RequestQueue
    request: PoolingRequest | None
    failure: str = field(default="", init=False)
    """Why the last pass failed; empty if it did not, or if a batch has succeeded since."""

    async def compute(self) -> None:
        """Compute the row and set ``failure``. Cancellation: at once; the row leaves the queue."""
        if self.request is None:
            return
        submission = Submission([self.request], require_finite)
        entries = list(submission.entries)
        try:
            self.queue.put_nowait(*entries)
            await submission.wait()
        except PoolServeError as error:
            self.failure = f"the probe pass failed: {error}"
        else:
            self.failure = ""
        finally:
            for entry in entries:
                self.queue.withdraw(entry)

    async def run(self, interval_s: float, launched: Callable[[], int]) -> NoReturn:
        """Compute the row whenever ``launched()``, a count of batches, has not changed for ``interval_s``.

        Cancellation: at once.
        """
        before = launched()
        while True:
            await trio.sleep(interval_s)
            if launched() == before:
                await self.compute()
            before = launched()
