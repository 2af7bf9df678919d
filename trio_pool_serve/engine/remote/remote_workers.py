"""The links of an engine to the processes that compute for it: on this machine, on others, and on Ray's nodes."""

from collections.abc import Sequence
from typing import ClassVar

import trio
from attrs import define, evolve, field

from trio_pool_serve.engine.devices import Devices
from trio_pool_serve.engine.engine_statistics import EngineState, LinkStatistics, ModelMemory
from trio_pool_serve.engine.model_queue import ModelQueue
from trio_pool_serve.engine.remote.connectors import Connector
from trio_pool_serve.engine.remote.remote_device import RemoteDevice
from trio_pool_serve.engine.remote.wire import Hello
from trio_pool_serve.types import ComputedBy, RunnerFacts


@define(eq=False)
class RemoteWorkers(Devices):
    """Links to the device servers of one model; one task gives them batches.

    ``connectors`` lead to replicas that exist now or later, and that others restart: while none is connected, the state
    is loading. More device servers may join and leave.
    """

    loading_message: ClassVar[str] = "No engine process is ready."
    queue: ModelQueue = field(kw_only=True)
    connectors: Sequence[Connector] = field(kw_only=True)
    links: list[RemoteDevice] = field(init=False)
    """One link for each of ``connectors``."""
    _said_tokens: int = field(init=False, default=0)
    """Tokens of admitted requests when device servers were last told, or when they had halved since."""
    _used: dict[RemoteDevice, None] = field(init=False, factory=dict)
    """The links to device servers that have been ready lately."""

    _merged: list[RemoteDevice] = field(init=False, factory=list)
    """The links whose ``computed_by`` is in the facts."""

    def __attrs_post_init__(self) -> None:
        self.links = [
            RemoteDevice(each, self.use, self.config.stall_timeout_s, self.config.silence_timeout_s)
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

    def use(self, link: RemoteDevice, hello: Hello) -> ModelQueue:
        """Use a device server that is ready, one of ``connectors`` or one that joins; return the queue of its rows."""
        if not self.dispatcher.devices:
            self._facts, self._merged = hello.facts, []
        self._used = dict.fromkeys([*self._ready, link])
        return self.queue

    @property
    def _ready(self) -> list[RemoteDevice]:
        """The links to device servers that are connected, including those that are draining."""
        return [each for each in self._used if each.hello is not None]

    @property
    def _hellos(self) -> list[Hello]:
        return [each.hello for each in self._used if each.hello is not None]

    @property
    def facts(self) -> RunnerFacts:
        """Facts of the first device server that was ready, and ``computed_by`` of all that are ready.

        Raises ``EngineLoadingError`` before one has been ready.
        """
        facts, ready = super().facts, self._ready
        if ready and ready != self._merged:
            hellos = self._hellos
            each = [{getattr(hello, name) for hello in hellos} - {""} for name in ComputedBy._fields]
            facts = evolve(facts, computed_by=ComputedBy(*(", ".join(sorted(values)) for values in each)))
            self._facts, self._merged = facts, ready
        return facts

    def note_admitted(self) -> None:
        """Tell device servers if admitted tokens have doubled: in a flood, no credit returns soon."""
        tokens = self.queue.admission.tokens
        if tokens > 2 * max(self._said_tokens, self.facts.max_batch_tokens):
            self._said_tokens = tokens
            for link in self._ready:
                link.say_admitted()
        elif 2 * tokens < self._said_tokens:
            self._said_tokens = tokens

    @property
    def takes_rows(self) -> bool:  # noqa: D102
        return any(link.takes_rows for link in self._used)

    @property
    def stall_reason(self) -> str:  # noqa: D102
        reasons = [link.stall_reason for link in self._used if link.takes_rows]
        return reasons[0] if reasons and all(reasons) else ""

    @property
    def memory(self) -> ModelMemory:  # noqa: D102
        hellos = self._hellos
        return ModelMemory(sum([each.resident_bytes for each in hellos]), sum([each.device_bytes for each in hellos]))

    def statistics(self) -> LinkStatistics:  # noqa: D102
        replicas: dict[str, dict[str, EngineState]] = {
            str(number): {"state": "stalled"} for number, link in enumerate(self.links) if link.stall_reason
        }
        scheduler = self.queue.scheduler
        return LinkStatistics(self.state, len(scheduler), scheduler.tokens, replicas=replicas)
