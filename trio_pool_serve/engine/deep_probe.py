"""The deep readiness probe: computes one row through queue and device, however many clients ask."""

import logging
import math
from collections.abc import Collection

import trio
from attrs import define, field

from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.queue_entry import require_finite
from trio_pool_serve.errors import PoolServeError

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""The row must be computed within this time."""

FRESH_S = 1.0
"""For this long, the result of a pass answers all probes: probes need no API key, so strangers could keep the device
busy."""


@define(eq=False)
class DeepProbe:
    """Computes a row on request; all requests that arrive meanwhile share the result. At most one row at a time."""

    engine: Engine
    timeout_s: float = TIMEOUT_S
    _turn: trio.Lock = field(init=False, factory=trio.Lock)
    failure: str = field(init=False, default="")
    """Why the last row was not computed in time; empty if it was."""
    _fresh_until: float = field(init=False, default=-math.inf)
    """The time until which ``failure`` answers probes."""

    async def update(self) -> None:
        """Compute a row, unless ``failure`` is fresh or another request computes one.

        Cancellation: at once, except for the request that computes: within ``timeout_s``, as others wait for its row.
        """
        async with self._turn:
            if trio.current_time() >= self._fresh_until:
                with trio.CancelScope(shield=True):  # ``_compute`` has a timeout
                    self.failure = await self._compute()
                self._fresh_until = trio.current_time() + FRESH_S

    async def _compute(self) -> str:
        """Return why a row is not computed in time; empty if it is, or if the model has no probe row."""
        try:
            with trio.fail_after(self.timeout_s):
                if (request := self.engine.facts.probe_request) is not None:
                    await self.engine.submit_all([request], require_finite)
        except trio.TooSlowError:
            return f"a probe was not computed within {self.timeout_s:g} s"
        except PoolServeError as error:
            return f"a probe failed: {error}"
        except Exception:
            logger.exception("a probe failed")
            return "a probe failed"
        return ""


async def failures_of(probes: Collection[DeepProbe]) -> str:
    """Update all probes concurrently; return why rows are not computed; empty if all are.

    Cancellation: as ``DeepProbe.update``.
    """
    async with trio.open_nursery() as nursery:
        for probe in probes:
            nursery.start_soon(probe.update)
    return "; ".join(probe.failure for probe in probes if probe.failure)
