"""Engines of this process behind real sockets of either kind, and what sends rows to them."""

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import trio
from attrs import define, field

from tests.engine.engines import linked_engine
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.config import SchedulingConfig, computing_config
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.remote.connectors import Connector, HostAddress, host_connector, unix_connector
from trio_pool_serve.engine.remote.device_server import DeviceServer, EngineListener
from trio_pool_serve.engine.remote.greeting import LinkKeys, answer_greeting
from trio_pool_serve.engine.remote.wire import FromEngine
from trio_pool_serve.errors import PoolServeError
from trio_pool_serve.processes.framed_stream import FramedStream
from trio_pool_serve.telemetry.metrics import Metrics
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Embed, PoolingOutput, PoolingParams, PoolingRequest, RenderedPrompt

EMBED = (Embed(),)

TIMEOUT_S = 30.0
"""Of links by TCP: this process is busy with other tests, too."""


def keys_of(path: Path, *keys: str) -> LinkKeys:
    """Return keys, by default one, that have been read from a file."""
    path.write_text("\n".join(keys or ("k" * 32,)))
    found = LinkKeys(path)
    found.read()
    return found


@define(eq=False)
class Replica:
    """What an engine process is made of, and the socket that outlives it."""

    path: Path
    runner: ScriptedRunner = field(factory=ScriptedRunner)
    stall_timeout_s: float = 60.0
    timeout_s: float = TIMEOUT_S
    by_tcp: bool = False
    zone: str = ""
    keys: LinkKeys = field(init=False)
    engine: DeviceServer = field(init=False)
    listener: EngineListener | None = field(init=False, default=None)
    leaving: trio.Event = field(init=False, factory=trio.Event)
    """Set to have it leave, if it listens by TCP."""
    has_left: bool = field(init=False, default=False)
    about: dict[str, str] = field(init=False, factory=dict)
    """What it says of itself."""
    listening: trio.socket.SocketType = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.keys = keys_of(self.path.with_name("key"))

    @asynccontextmanager
    async def listen(self, host: str = "127.0.0.1") -> AsyncIterator[None]:
        with trio.socket.socket(trio.socket.AF_INET if self.by_tcp else trio.socket.AF_UNIX) as self.listening:
            await self.listening.bind((host, 0) if self.by_tcp else str(self.path))
            self.listening.listen()
            yield

    @property
    def address(self) -> HostAddress:
        return HostAddress(*self.listening.getsockname())

    @property
    def connector(self) -> Connector:
        return host_connector(self.address, self.keys, self.timeout_s) if self.by_tcp else unix_connector(self.path)

    @asynccontextmanager
    async def live(self) -> AsyncIterator[None]:
        """Be alive until the block is left; connections break then."""
        batch_timeout_s = self.stall_timeout_s / computing_config.STALL_SHARE
        config = SchedulingConfig(max_batch_tokens=16, batch_timeout_s=batch_timeout_s)
        offload = Offload(launch=self.runner.concurrent_launches)
        self.engine = DeviceServer(
            config, load=lambda: self.runner, offload=offload, metrics=Metrics().of_engine("m"), zone=self.zone
        )
        self.engine.about, self.leaving, self.has_left = self.about, trio.Event(), False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.engine.run)
            await self.engine.dispatcher.wait_ready()
            own = socket.socket(fileno=socket.dup(self.listening.fileno()))
            listener = trio.SocketListener(trio.socket.from_stdlib_socket(own))
            if self.by_tcp:
                self.listener = EngineListener(self.engine, self.keys)
                nursery.start_soon(self._serve_until_leaving, [listener])
            else:
                nursery.start_soon(trio.serve_listeners, self.engine.serve, [listener])
            try:
                yield
            finally:
                self.runner.gate.set()
                nursery.cancel_scope.cancel()

    async def _serve_until_leaving(self, listeners: list[trio.SocketListener]) -> None:
        await self.listener.serve_until(self.leaving, listeners)
        self.has_left = True

    async def connect(self) -> FramedStream[FromEngine]:
        """Connect as an API process does, with what has to be said first."""
        return await self.connector.connect()

    async def accept(self) -> trio.SocketStream:
        """Accept a connection as an engine process does, and answer what is said first."""
        peer, _ = await self.listening.accept()
        stream = trio.SocketStream(peer)
        if self.by_tcp:
            await answer_greeting(stream, self.keys.keys)
        return stream


@asynccontextmanager
async def asking(*replicas: Replica, stall_timeout_s: float = 60.0, **settings) -> AsyncIterator[Engine]:
    config = SchedulingConfig(batch_timeout_s=stall_timeout_s / computing_config.STALL_SHARE)
    connectors = [replica.connector for replica in replicas]
    engine = linked_engine(connectors, config, **settings)
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        yield engine
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def two_alive(first: Replica, second: Replica) -> AsyncIterator[None]:
    async with first.listen(), second.listen(), first.live(), second.live():
        yield


def request(*ids: int, params: tuple[PoolingParams, ...] = EMBED) -> PoolingRequest:
    return PoolingRequest(RenderedPrompt(np.array(ids, dtype=np.int32)), params)


async def outcome_of(engine: Engine, asked: PoolingRequest) -> PoolingOutput | Exception:
    try:
        return await engine.submit(asked)
    except PoolServeError as error:
        return error


def frame_of(message: object, payload: bytes = b"") -> bytes:
    """Return the bytes by which a message is sent."""
    header = msgspec.msgpack.encode(message)
    return struct.pack("<IQ", len(header), len(payload)) + header + payload
