"""The links of an engine to the processes that compute for it: on this machine, on others, and on Ray's nodes."""

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import trio
from attrs import define, field

from trio_pool_serve.config import SchedulingConfig
from trio_pool_serve.engine.admission import Admission
from trio_pool_serve.engine.compute_rates import SecondsPerToken
from trio_pool_serve.engine.dispatcher import Dispatcher
from trio_pool_serve.engine.engine_statistics import EngineState, LinkStatistics, ModelMemory
from trio_pool_serve.engine.remote.connectors import Connector
from trio_pool_serve.engine.remote.remote_device import RemoteDevice
from trio_pool_serve.engine.remote.wire import DeviceFacts, Hello
from trio_pool_serve.engine.scheduler import Scheduler
from trio_pool_serve.errors import EngineProcessDiedError
from trio_pool_serve.telemetry.metrics import EngineMetrics
from trio_pool_serve.types import ComputedBy, PoolingRequest


@define(eq=False)
class RemoteWorkers:
    """Links to the device servers of one model; one task gives them batches.

    ``connectors`` lead to replicas that exist now or later, and that others restart: while none is connected, the state
    is loading. More device servers may join and leave.
    """

    loading_message: ClassVar[str] = "No engine process is ready."
    connectors: Sequence[Connector]
    metrics: EngineMetrics
    config: SchedulingConfig = field(factory=SchedulingConfig)
    queue: Scheduler = field(init=False)
    """Set by the engine, like ``dispatcher`` and ``admission``."""
    dispatcher: Dispatcher = field(init=False)
    admission: Admission = field(init=False)
    links: list[RemoteDevice] = field(init=False)
    """One link for each of ``connectors``."""
    _ready: list[RemoteDevice] = field(init=False, factory=list)
    """The ready links, including others that have joined."""
    _said_tokens: int = field(init=False, default=0)
    """Tokens of admitted requests when device servers were last told, or when they had halved since."""
    facts: DeviceFacts = field(init=False)
    """Facts about the model, from the first device server that was ready; unset before."""
    computed_by: ComputedBy = field(default=ComputedBy(), init=False)
    """The values of all ready device servers."""

    def __attrs_post_init__(self) -> None:
        self.links = [
            RemoteDevice(each, self.add_ready, self.config.stall_timeout_s, self.config.silence_timeout_s)
            for each in self.connectors
        ]

    async def run(self) -> None:
        """Connect, and give batches to ready links, until cancelled. Cancellation: at once; all rows fail."""
        try:
            async with trio.open_nursery() as nursery:
                for link in self.links:
                    nursery.start_soon(link.run)
                # Links that join are run by others.
                await self.dispatcher.pull(self._ready, nursery)
        finally:
            self.dispatcher.close()

    def add_ready(self, link: RemoteDevice, hello: Hello) -> None:
        """Use a device server that is ready: one of ``connectors``, or one that has joined."""
        link.queue, link.dispatcher, link.admission = self.queue, self.dispatcher, self.admission
        link.on_lost = self.lose
        if not self._ready:
            self.facts = hello
        self._note_computed_by(hello)
        self._ready.append(link)
        self.dispatcher.devices = [*self._ready]

    def lose(self, link: RemoteDevice) -> None:
        """Stop using a device server. After the last one all waiting rows fail: others may take minutes to load."""
        self._ready.remove(link)
        self._note_computed_by()
        self.dispatcher.devices = [*self._ready]
        if not self._ready:
            self.dispatcher.fail_waiting(EngineProcessDiedError(link.connector.loss))

    def _note_computed_by(self, *new: Hello) -> None:
        hellos = [*new, *(link.hello for link in self._ready if link.hello is not None)]
        if hellos:  # else keep the values of the last ones
            each = [{getattr(hello, name) for hello in hellos} - {""} for name in ComputedBy._fields]
            self.computed_by = ComputedBy(*(", ".join(sorted(values)) for values in each))

    def note_admitted(self) -> None:
        """Tell device servers if admitted tokens have doubled: in a flood, no credit returns soon."""
        tokens = self.admission.tokens
        if tokens > 2 * max(self._said_tokens, self.facts.max_batch_tokens):
            self._said_tokens = tokens
            for link in self._ready:
                link.say_admitted()
        elif 2 * tokens < self._said_tokens:
            self._said_tokens = tokens

    @property
    def probe_request(self) -> PoolingRequest | None:
        """The first ready device server's."""
        return self.facts.probe_request

    @property
    def takes_rows(self) -> bool:
        """Whether a device server is ready to compute rows."""
        return any(link.takes_rows for link in self._ready)

    @property
    def stall_reason(self) -> str:
        """Why no batches return from any device server; empty if some do."""
        reasons = [link.stall_reason for link in self._ready if link.takes_rows]
        return reasons[0] if reasons and all(reasons) else ""

    @property
    def state(self) -> EngineState:
        """The state of all device servers together."""
        if not self.takes_rows:
            return "loading"
        return "stalled" if self.stall_reason else "ready"

    @property
    def memory(self) -> ModelMemory:
        """The memory of the loaded model in all processes, including other machines."""
        hellos = [link.hello for link in self._ready if link.hello is not None]
        return ModelMemory(sum(each.resident_bytes for each in hellos), sum(each.device_bytes for each in hellos))

    def shared(self, rates: SecondsPerToken) -> SecondsPerToken:
        """Return the rates of this process's rows, reduced by the turns of other API processes.

        ``rates`` are the rates of all devices together; while they are unknown, the device servers' own rates count.
        """
        told = [link.told for link in self._ready if link.told is not None and link.is_available]
        if math.isnan(rates[0]):
            per_s = sum([1 / each.seconds_per_token for each in told if each.seconds_per_token])
            rates = np.full_like(rates, 1 / per_s if per_s else math.nan)
        # The minimum: rows are computed by that device server, and another may have far more, or claim so.
        return rates * (1 + min([each.others_share for each in told], default=0.0))

    def statistics(self) -> LinkStatistics:
        """Return the state and the rows that wait in this process, without admitted requests."""
        replicas: dict[str, dict[str, EngineState]] = {
            str(number): {"state": "stalled"} for number, link in enumerate(self.links) if link.stall_reason
        }
        return LinkStatistics(self.state, len(self.queue), self.queue.tokens, replicas=replicas)
