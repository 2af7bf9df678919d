"""The engine whose model is computed by device servers: engine processes of this machine, of others, and of Ray."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np
import trio
from attrs import define, field

from trio_pool_serve.config import SchedulingConfig
from trio_pool_serve.engine.admission import AdmittedRequest, EstimatedWork
from trio_pool_serve.engine.compute_rates import SecondsPerToken
from trio_pool_serve.engine.device import DeviceFacts
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.model_memory import ModelMemory
from trio_pool_serve.engine.remote.connectors import Connector
from trio_pool_serve.engine.remote.remote_device import RemoteDevice
from trio_pool_serve.engine.remote.wire import Hello
from trio_pool_serve.errors import EngineProcessDiedError
from trio_pool_serve.telemetry.metrics import EngineMetrics
from trio_pool_serve.types import PoolingParams, PoolingRequest, RenderedPrompt


@define(eq=False, repr=False)
class RemoteEngine(Engine):
    """Gives batches to the device servers of one model; one task takes them for all.

    ``connectors`` are for replicas which are there now or later, and are restarted elsewhere: while none is there, the
    engine's state is loading. More devices may join and leave.
    """

    connectors: Sequence[Connector]
    metrics: EngineMetrics
    config: SchedulingConfig = field(factory=SchedulingConfig)
    zone: str = field(default="", kw_only=True)
    loading_message: ClassVar[str] = "No engine process is ready."
    own_devices: list[RemoteDevice] = field(init=False)
    """Those of ``connectors``."""
    _ready: list[RemoteDevice] = field(init=False, factory=list)
    _facts: DeviceFacts = field(init=False)
    """Of the device that was ready first."""
    _said_tokens: int = field(default=0, init=False)
    """Tokens of admitted requests when device servers were told of them last, or half as many."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.dispatcher.zone = self.zone
        self.own_devices = [
            RemoteDevice(connector, self.add_ready, self.lose, self.config.stall_timeout_s)
            for connector in self.connectors
        ]

    def add_ready(self, device: RemoteDevice) -> None:
        """Use a device server that is ready, one of this engine's own or another that has joined."""
        device.queue, device.dispatcher, device.admission = self.scheduler, self.dispatcher, self.admission
        if not self._ready:
            self._facts = _facts_of(device.hello)
        self._ready.append(device)
        self.dispatcher.devices = [*self._ready]

    def lose(self, device: RemoteDevice) -> None:
        """Do without a device. With the last one all rows that wait fail, as others may take minutes to load."""
        self._ready.remove(device)
        self.dispatcher.devices = [*self._ready]
        if not self._ready and not self.is_dead:
            self.dispatcher.fail_waiting(EngineProcessDiedError(device.connector.loss))

    def admit(self, work: EstimatedWork) -> AbstractContextManager[AdmittedRequest]:  # noqa: D102
        self.require_ready()
        if (tokens := self.admission.tokens) > 2 * max(self._said_tokens, self._facts.max_batch_tokens):
            self._said_tokens = tokens
            for device in self._ready:
                device.say_admitted()  # at the start of a flood no credit comes back in time to say it with a batch
        elif 2 * tokens < self._said_tokens:
            self._said_tokens = tokens
        return super().admit(work)

    async def _compute(self) -> None:
        async with trio.open_nursery() as nursery:
            for device in self.own_devices:
                nursery.start_soon(device.run)
            # Devices that join are run by others.
            await self.dispatcher.pull(self._ready, nursery)

    @property
    def takes_rows(self) -> bool:  # noqa: D102
        return any(device.takes_rows for device in self._ready)

    @property
    def facts(self) -> DeviceFacts:  # noqa: D102
        self.require_ready()
        return self._facts

    @property
    def memory(self) -> ModelMemory:  # noqa: D102  (those of other machines included)
        hellos = [device.hello for device in self._ready if device.hello is not None]
        return ModelMemory(sum(each.resident_bytes for each in hellos), sum(each.device_bytes for each in hellos))

    @property
    def stall_reason(self) -> str:  # noqa: D102
        reasons = [device.stall_reason for device in self._ready if device.takes_rows]
        return reasons[0] if reasons and all(reasons) else ""

    @property
    def seconds_per_token(self) -> SecondsPerToken:
        """The rates of all devices together, slower by the turns that other API processes have."""
        told = [device.told.others_share for device in self._ready if device.told and device.is_available]
        others = min(told, default=0.0)  # by which rows are computed: one may have far more than the others, or say so
        return self.dispatcher.rates.seconds_per_token * (1 + others)

    @property
    def reported_load(self) -> dict[str, Any]:  # noqa: D102  (device servers do not report that they are silent)
        stalled = [number for number, device in enumerate(self.own_devices) if device.stall_reason]
        return {**super().reported_load, "replicas": {str(number): {"state": "stalled"} for number in stalled}}


def _facts_of(hello: Hello | None) -> DeviceFacts:
    assert hello is not None  # noqa: S101  (the device is ready)
    probe = None
    if hello.probe is not None and (kind := PoolingParams.by_name.get(hello.probe[1])) is not None:
        probe = PoolingRequest(RenderedPrompt(np.array(hello.probe[0], np.int32)), (kind(),))
    sizes = hello.dimensions, hello.embeds_width, hello.max_batch_tokens
    return DeviceFacts(*sizes, hello.cosine_with_float32, probe)
