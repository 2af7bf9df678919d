"""The server side of an engine process: one device, shared by the API processes that are connected.

There is no admission and no order between clients here: API processes have them, and send a batch when they have a
credit for it. Credits stand: one comes back with the answers to its batch, or when the connection ends.
"""

from collections.abc import Callable, Mapping

import trio
from attrs import define, field

from trio_pool_serve.config import SchedulingConfig
from trio_pool_serve.engine.dispatcher import Dispatcher
from trio_pool_serve.engine.in_flight import InFlightBatch
from trio_pool_serve.engine.remote.api_connection import ApiConnection
from trio_pool_serve.engine.remote.joiner import Joiner
from trio_pool_serve.engine.remote.wire import CREDITS, Hello, ToEngine
from trio_pool_serve.engine.worker import Worker
from trio_pool_serve.processes.framed_stream import FramedStream
from trio_pool_serve.telemetry.metrics import EngineMetrics
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Runner


@define(eq=False)
class DeviceServer:
    """Computes the batches of API processes on one runner, which ``load()`` returns; it is called in a thread."""

    load: Callable[[], Runner]
    offload: Offload
    metrics: EngineMetrics
    config: SchedulingConfig = field(factory=SchedulingConfig)
    zone: str = ""
    about: Mapping[str, str] = field(init=False, factory=dict)
    """Further fields of ``Hello``: what an engine for other machines says about itself."""
    worker: Worker = field(init=False)
    joiner: Joiner = field(init=False, factory=Joiner)
    connections: dict[ApiConnection, None] = field(init=False, factory=dict)
    computed_tokens: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self.worker = Worker(self.load, self.offload, self.metrics, self.config)
        self.worker.queue = self.joiner
        self.worker.dispatcher = Dispatcher(self.joiner, self.metrics.busy, on_computed=self._note_computed)
        self.metrics.add_gauges(lambda: self.worker.statistics().gauges())

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serve one API process until it disconnects. Cancellation: at once; its batches are withdrawn."""
        await ApiConnection(self, FramedStream(stream, ToEngine)).serve()

    def hello(self) -> Hello:
        """Return what is said first on each connection."""
        facts, runner = self.worker.facts, self.worker.loaded
        probe = facts.probe_request
        return Hello(
            facts.dimensions,
            facts.embeds_width,
            facts.max_batch_tokens,
            facts.cosine_with_float32,
            None if probe is None else (probe.prompt.token_ids.tolist(), probe.params[0].wire_name),
            zone=self.zone,
            resident_bytes=self.worker.memory.resident_bytes,
            device_bytes=self.worker.memory.device_bytes,
            launches=runner.concurrent_launches,
            pads=runner.pads,
            planned_launches=runner.background_launches,
            **self.worker.computed_by._asdict(),
            **self.about,
        )

    @property
    def most_batches(self) -> int:
        """Batches that an API process may have here at a time, planned ones included."""
        runner = self.worker.loaded
        return CREDITS * runner.concurrent_launches + max(runner.concurrent_launches, runner.background_launches)

    def _note_computed(self, batch: InFlightBatch) -> None:
        self.computed_tokens += batch.batch.tokens
        for sent in {entry.holder for entry in batch.entries}:
            sent.device_s += batch.device_s

    def __repr__(self) -> str:
        return f"<DeviceServer {self.worker.state}, {self.joiner!r}, {len(self.connections)} API processes>"
