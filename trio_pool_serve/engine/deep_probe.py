"""The deep readiness probe: one row through queue and device, however many ask."""

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
"""The row must come back within this time."""

FRESH_S = 1.0
"""The result of a pass is the answer to all probes that come so soon after it: probes need no API key, and strangers
must not keep the device busy."""


@define(eq=False)
class DeepProbe:
    """Computes a row when someone asks; all who ask meanwhile share the result. At most one row at a time."""

    engine: Engine
    timeout_s: float = TIMEOUT_S
    _wanted: trio.Event = field(init=False, factory=trio.Event)
    _known: trio.Event = field(init=False, factory=trio.Event)
    """Set while ``_failure`` answers those who ask."""
    _failure: str = field(init=False, default="")

    async def failure(self) -> str:
        """Return why a row does not come back in time; empty if it does. ``run`` has to run.

        Cancellation: at once; the pass goes on for others.
        """
        self._wanted.set()
        await self._known.wait()
        return self._failure

    async def run(self) -> NoReturn:
        """Compute the rows that are asked for, forever. Cancellation: at once; those who ask go on waiting."""
        while True:
            await self._wanted.wait()
            self._failure = await self._compute()
            self._known.set()
            await trio.sleep(FRESH_S)
            self._wanted, self._known = trio.Event(), trio.Event()

    async def _compute(self) -> str:
        """Return why a row does not come back in time; empty if it does, or if no row is known that could be sent."""
        try:
            with trio.fail_after(self.timeout_s):
                if (request := self.engine.facts.probe_request) is not None:
                    await self.engine.submit_all([request], require_finite)
        except trio.TooSlowError:
            return f"a probe has not come back within {self.timeout_s:g} s"
        except PoolServeError as error:
            return f"a probe failed: {error}"
        except Exception:
            logger.exception("a probe failed")
            return "a probe failed"
        return ""


async def failures_of(probes: Iterable[DeepProbe]) -> str:
    """Return why rows do not come back, of all probes at once; empty if all do. Cancellation: at once."""
    failures: list[str] = []

    async def ask(probe: DeepProbe) -> None:
        failures.append(await probe.failure())

    async with trio.open_nursery() as nursery:
        for probe in probes:
            nursery.start_soon(ask, probe)
    return "; ".join(filter(None, failures))
