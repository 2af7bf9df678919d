"""The deep readiness probe: computes one row through queue and device, however many clients ask."""

import logging
from collections.abc import Iterable
from typing import NoReturn

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
    _wanted: trio.Event = field(init=False, factory=trio.Event)
    _known: trio.Event = field(init=False, factory=trio.Event)
    """Set while ``_failure`` is fresh."""
    _failure: str = field(init=False, default="")

    async def failure(self) -> str:
        """Return why a row is not computed in time; empty if it is. ``run`` must be running.

        Cancellation: at once; the pass continues for others.
        """
        self._wanted.set()
        await self._known.wait()
        return self._failure

    async def run(self) -> NoReturn:
        """Compute requested rows, forever. Cancellation: at once; callers of ``failure`` keep waiting."""
        while True:
            await self._wanted.wait()
            self._failure = await self._compute()
            self._known.set()
            await trio.sleep(FRESH_S)
            self._wanted, self._known = trio.Event(), trio.Event()

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


async def failures_of(probes: Iterable[DeepProbe]) -> str:
    """Run all probes concurrently; return why rows are not computed; empty if all are. Cancellation: at once."""
    failures: list[str] = []

    async def ask(probe: DeepProbe) -> None:
        failures.append(await probe.failure())

    async with trio.open_nursery() as nursery:
        for probe in probes:
            nursery.start_soon(ask, probe)
    return "; ".join(filter(None, failures))
