"""The links of an engine to the processes that compute for it: on this machine, on others, and on Ray's nodes."""

from collections.abc import Sequence

import trio
from attrs import define, evolve, field

from trio_pool_serve.engine.engine import Devices, ModelQueue
from trio_pool_serve.engine.engine_statistics import LinkStatistics, ModelMemory
from trio_pool_serve.engine.remote.connectors import Connector
from trio_pool_serve.engine.remote.remote_device import RemoteDevice
from trio_pool_serve.types import ComputedBy, RunnerFacts


@define(eq=False)
class RemoteWorkers(Devices):
    """Links to the device servers of one model; one task gives them batches.

    ``connectors`` lead to replicas that exist now or later, and that others restart: while none is connected, the state
    is loading. More device servers may join and leave.
    """

    loading_message = "No engine process is ready."
    queue: ModelQueue = field(kw_only=True)
    connectors: Sequence[Connector] = field(kw_only=True)
    links: list[RemoteDevice] = field(init=False)
    """One link for each of ``connectors``."""
    _merged: list[RunnerFacts] = field(init=False, factory=list)
    """Facts of the device servers whose ``computed_by`` is in the facts of all."""

    def __attrs_post_init__(self) -> None:
        self.links = [
            RemoteDevice(each, lambda _: self.queue, self.config.stall_timeout_s, self.config.silence_timeout_s)
            for each in self.connectors
        ]

    async def run(self) -> None:
        """Connect, and give batches to ready links, until cancelled. Cancellation: at once; all rows fail."""
        try:
            async with trio.open_nursery() as nursery:
                for link in self.links:
                    nursery.start_soon(link.run)
                # Links that join are run by others.
                await self.dispatcher.pull(nursery)
        finally:
            self.dispatcher.close()

    @property
    def _ready(self) -> list[RemoteDevice]:
        """The links to device servers that are connected, including links that join and servers that are draining."""
        return [each for each in self.dispatcher.devices if isinstance(each, RemoteDevice)]

    @property
    def facts(self) -> RunnerFacts:
        """Facts of the first device server that is ready, or was ready last, and ``computed_by`` of all that are ready.

        Raises ``EngineLoadingError`` before one has been ready.
        """
        ready = [link.facts for link in self._ready]
        if ready and ready != self._merged:
            columns = zip(*[facts.computed_by for facts in ready], strict=True)
            computed_by = ComputedBy(*(", ".join(sorted({*names} - {""})) for names in columns))
            self._facts, self._merged = evolve(ready[0], computed_by=computed_by), ready
        return super().facts

    @property
    def takes_rows(self) -> bool:  # noqa: D102
        return any(link.takes_rows for link in self._ready)

    def note_admitted(self) -> None:  # noqa: D102
        tokens = self.queue.admission.tokens
        for link in self._ready:
            link.note_admitted(tokens)

    @property
    def stall_reason(self) -> str:  # noqa: D102
        reasons = [link.stall_reason for link in self._ready if link.takes_rows]
        return reasons[0] if reasons and all(reasons) else ""

    @property
    def memory(self) -> ModelMemory:  # noqa: D102
        hellos = [link.hello for link in self._ready if link.hello is not None]
        return ModelMemory(sum([each.resident_bytes for each in hellos]), sum([each.device_bytes for each in hellos]))

    def statistics(self) -> LinkStatistics:  # noqa: D102
        scheduler = self.queue.scheduler
        return LinkStatistics(
            self.state,
            queued_rows=len(scheduler),
            queued_tokens=scheduler.tokens,
            replicas={str(number): {"state": "stalled"} for number, link in enumerate(self.links) if link.stall_reason},
        )
