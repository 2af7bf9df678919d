"""Engines over scripted runners, rows for them, and windows of background work whose members submit rows."""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np
import trio
from attrs import Factory, define, field
from trio.testing import wait_all_tasks_blocked

from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.config import SchedulingConfig
from trio_pool_serve.engine.engine import Engine, ModelQueue
from trio_pool_serve.engine.planned_window import PlannedWindow
from trio_pool_serve.engine.remote.connectors import Connector
from trio_pool_serve.engine.remote.remote_workers import RemoteWorkers
from trio_pool_serve.engine.worker import Worker
from trio_pool_serve.errors import PoolServeError
from trio_pool_serve.telemetry.metrics import Metrics
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Batch, PoolingOutput, PoolingRequest, Prepare, RenderedPrompt, Runner


def request(*ids: int, **fields) -> PoolingRequest:
    return PoolingRequest(RenderedPrompt(np.array(ids, dtype=np.int32)), **fields)


def row(tokens: int, first: int = 1) -> PoolingRequest:
    return request(first, *[1] * (tokens - 1))


def first_ids(batch: Batch) -> list[int]:
    return [int(request.prompt.token_ids[0]) for request in batch.requests]


def engine_over(
    runner: Runner | Callable[[], Prepare], launches: int = 1, offload: Offload | None = None, **settings
) -> Engine:
    """Return an engine that computes by a runner, or by the one that a function loads."""
    prepare = runner if isinstance(runner, ScriptedRunner) else lambda _: runner
    load = (lambda: prepare) if hasattr(runner, "launch") else runner
    config, metrics = SchedulingConfig(**settings), Metrics().of_engine("m")
    offload = offload or Offload(launch=launches)
    queue = ModelQueue(config.max_queue_s, metrics)
    return Engine(queue, Worker(queue.dispatcher, config, load=load, offload=offload, metrics=metrics))


def linked_engine(
    connectors: Sequence[Connector], config: SchedulingConfig | None = None, zone: str = "", name: str = "m"
) -> Engine:
    """Return an engine that computes in other processes."""
    config = config or SchedulingConfig()
    queue = ModelQueue(config.max_queue_s, Metrics().of_engine(name), zone)
    return Engine(queue, RemoteWorkers(queue.dispatcher, config, queue=queue, connectors=connectors))


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[Engine]:
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        await engine.wait_ready()
        yield engine
        nursery.cancel_scope.cancel()


async def in_thread(wait: Callable[[], object]) -> None:
    await trio.to_thread.run_sync(wait, limiter=trio.CapacityLimiter(1))


@asynccontextmanager
async def computing(engine: Engine, runner: ScriptedRunner) -> AsyncIterator[trio.Nursery]:
    """Have a row computed until the block is left; then wait for the tasks of the nursery."""
    runner.gate.clear()
    runner.launching.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.submit, request(1))
        await in_thread(runner.launching.wait)
        yield nursery
        runner.gate.set()


@define(eq=False)
class Outcomes:
    """What became of rows, by their number."""

    answered: dict[int, PoolingOutput] = field(factory=dict)
    failed: dict[int, Exception] = field(factory=dict)

    async def submit(self, engine: Engine, number: int, row: PoolingRequest) -> None:
        try:
            self.answered[number] = await engine.submit(row)
        except Exception as error:
            self.failed[number] = error


@define(eq=False)
class Members:
    """The members of a window of an engine over scripted runners, and what they were given."""

    engine: Engine
    size: int
    window: PlannedWindow = field(init=False, default=Factory(lambda self: PlannedWindow(self.size), takes_self=True))
    outcomes: dict[int, list[float] | PoolServeError] = field(init=False, factory=dict)
    """For each member that was not cancelled, the lengths of its rows as the runner has seen them, or its error."""
    scopes: dict[int, trio.CancelScope] = field(init=False, factory=lambda: defaultdict(trio.CancelScope))

    async def submit(self, index: int, *rows: PoolingRequest) -> None:
        with self.scopes[index], self.window.members[index] as member:
            try:
                outputs = await member.submit_all(self.engine, rows)
            except PoolServeError as error:
                self.outcomes[index] = error
            else:
                self.outcomes[index] = [output.values[0][0] for output in outputs]


async def compute_window(
    engine: Engine, *of_members: Sequence[PoolingRequest], order: Sequence[int] | None = None
) -> list[list[float] | PoolServeError]:
    """Return the outcome of each member of a window, which submit all at once, or one after the other in an order."""
    members = Members(engine, len(of_members))
    async with trio.open_nursery() as nursery:
        for index in order or range(len(of_members)):
            nursery.start_soon(members.submit, index, *of_members[index])
            if order:
                await wait_all_tasks_blocked()
    return [members.outcomes[index] for index in range(len(of_members))]
