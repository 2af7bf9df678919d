"""A device and its API processes in virtual time: all code is real but the runner, the sockets and ``time``.

What an API process receives or sends waits for its loop, which is late, and which may stop for a while again and again.
"""

import math
import random
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np
import trio
from attrs import define, field
from trio.testing import memory_stream_pair

from tests.engine.engines import linked_engine
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.remote.connectors import Connector
from trio_pool_serve.engine.remote.device_server import DeviceServer
from trio_pool_serve.engine.remote.wire import FromEngine
from trio_pool_serve.processes.framed_stream import FramedStream
from trio_pool_serve.telemetry.metrics import Metrics
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Batch, CopiedBatch, Embed, PooledBatch, PoolingRequest, RenderedPrompt

T = TypeVar("T")

P50_S, P99_S = 0.0019, 0.016
"""How late the loop of an API process is."""

SIGMA = math.log(P99_S / P50_S) / 2.326


def row(tokens: int, token: int = 1, *, client: int = 0, **prompt: Any) -> PoolingRequest:
    """Return a row of one token again and again."""
    return PoolingRequest(RenderedPrompt(np.full(tokens, token, np.int32), **prompt), (Embed(),), client=client)


@define(eq=False)
class MemorySocket:
    """One end of an unbounded connection within this process, with what of a ``trio.SocketStream`` is used."""

    stream: trio.StapledStream[Any, Any]

    @property
    def socket(self) -> "MemorySocket":
        return self

    async def send(self, piece: memoryview) -> int:
        await self.stream.send_all(bytes(piece))
        return len(piece)

    async def receive_some(self, most: int) -> bytes:
        return await self.stream.receive_some(most)

    async def recv_into(self, buffer: memoryview) -> int:
        received = await self.stream.receive_some(len(buffer))
        buffer[: len(received)] = received
        return len(received)

    async def aclose(self) -> None:
        await self.stream.aclose()


@define(eq=False)
class ComputedBatch:
    """The handle on a batch that is computed at a certain time."""

    copied: CopiedBatch
    done_at: float

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._wait().__await__()

    async def _wait(self) -> list[Any]:
        await trio.sleep_until(self.done_at)
        return self.copied.rows


@define(eq=False)
class SimulatedRunner(ScriptedRunner):
    """Computes one batch after the other, each in ``constant_s`` and ``token_s`` for each of its tokens."""

    constant_s: float = 0.003
    token_s: float = 5e-6
    default_batch_tokens: int = 2048
    _free_at: float = field(default=0.0, init=False)

    def launch(self, batch: Batch) -> PooledBatch:
        copied = super().launch(batch)
        self._free_at = max(trio.current_time(), self._free_at) + self.constant_s + self.token_s * batch.padded_tokens
        return ComputedBatch(copied, self._free_at)

    @property
    def passes(self) -> list[list[int]]:
        """The last token of each row, of each pass."""
        return [[int(request.prompt.token_ids[-1]) for request in batch.requests] for batch in self.batches]


@define(eq=False)
class LoopOffload(Offload):
    """Runs everything on the loop; with ``launches_block``, a launch takes as long as its pass, as on CPU."""

    in_threads: bool = False
    launches_block: bool = field(default=False, kw_only=True)

    async def run(self, kind: Any, blocking: Callable[[], T], **options: Any) -> T:
        result = await super().run(kind, blocking, **options)
        if self.launches_block and isinstance(result, ComputedBatch):
            await trio.sleep_until(result.done_at)
        return result


@define(eq=False)
class LateLoop:
    """The loop of an API process, which is late for each frame and stops ``stopped_s`` in each tenth of a second."""

    seed: int = 0
    is_late: bool = True
    stopped_s: float = 0.0
    _random: random.Random = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._random = random.Random(self.seed)

    async def turn(self) -> None:
        if self.is_late:
            await trio.sleep(self._random.lognormvariate(math.log(P50_S), SIGMA))
        if (within := trio.current_time() % 0.1) < self.stopped_s:
            await trio.sleep(self.stopped_s - within)


@define(eq=False)
class LateStream(FramedStream[FromEngine]):
    """What an API process sends and receives, each frame when its loop gets to it."""

    loop: LateLoop = field(factory=LateLoop, kw_only=True)
    sent: list[Any] = field(factory=list, init=False)
    got: list[Any] = field(factory=list, init=False)

    async def send(self, message: object, buffers: Any = ()) -> None:
        await self.loop.turn()
        self.sent.append(message)
        await super().send(message, buffers)

    async def receive(self) -> tuple[FromEngine, memoryview] | None:
        received = await super().receive()
        await self.loop.turn()
        if received is not None:
            self.got.append(received[0])
        return received


@define(eq=False)
class MemoryConnector(Connector):
    """Connects an API process to a device server of this process."""

    server: DeviceServer = field(kw_only=True)
    nursery: trio.Nursery = field(kw_only=True)
    loop: LateLoop = field(kw_only=True)
    stream: LateStream = field(init=False)

    async def connect(self) -> FramedStream[FromEngine]:
        near, far = memory_stream_pair()
        self.nursery.start_soon(self.server.serve, MemorySocket(far))
        self.stream = LateStream(MemorySocket(near), FromEngine, loop=self.loop)
        await trio.lowlevel.checkpoint()
        return self.stream


@define(eq=False)
class Simulation:
    """Device servers, and API processes that are connected to all of them."""

    nursery: trio.Nursery
    servers: list[DeviceServer] = field(init=False, factory=list)
    answered: int = field(init=False, default=0)
    """Rows of all closed-loop clients."""
    _running: dict[Engine, trio.CancelScope] = field(init=False, factory=dict)

    async def add_device(self, runner: SimulatedRunner, *, launches_block: bool = False) -> DeviceServer:
        offload, metrics = LoopOffload(launches_block=launches_block), Metrics().of_engine("m")
        server = DeviceServer(load=lambda: runner, offload=offload, metrics=metrics)
        self.nursery.start_soon(server.run)
        await server.dispatcher.wait_ready()
        self.servers.append(server)
        return server

    async def add_process(self, loop: LateLoop | None = None) -> Engine:
        """Return the engine of another API process, connected to the devices that are there."""
        loop = loop or LateLoop(is_late=False)
        connectors = [
            MemoryConnector("memory", trio.sleep_forever, server=server, nursery=self.nursery, loop=loop)
            for server in self.servers
        ]
        engine = linked_engine(connectors)
        self._running[engine] = await self.nursery.start(self._run, engine)
        while not all(device.answers for device in engine.devices.links):  # noqa: ASYNC110  (it comes by a connection)
            await trio.sleep(0.001)
        return engine

    async def _run(self, engine: Engine, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        with trio.CancelScope() as scope:
            task_status.started(scope)
            await engine.run()

    def kill(self, engine: Engine) -> None:
        """End an API process: its connections end, with whatever is on the way."""
        self._running[engine].cancel()

    async def ask_again(self, engine: Engine, tokens: int) -> None:
        """Be a client that sends a row whenever it has the answer to its last one."""
        while True:
            await engine.submit(row(tokens))
            self.answered += 1


@asynccontextmanager
async def simulated() -> AsyncIterator[Simulation]:
    """Return a simulation; all that runs in it ends with the block."""
    async with trio.open_nursery() as nursery:
        yield Simulation(nursery)
        nursery.cancel_scope.cancel()
