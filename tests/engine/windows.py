"""Windows of background work, whose members submit rows as a test says."""

from collections.abc import Sequence

import trio
from attrs import Factory, define, field
from trio.testing import wait_all_tasks_blocked

from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.planned_window import PlannedWindow
from trio_pool_serve.errors import PoolServeError
from trio_pool_serve.types import PoolingRequest


@define(eq=False)
class Members:
    """The members of a window of an engine over scripted runners, and what they were given."""

    engine: Engine
    size: int
    window: PlannedWindow = field(init=False, default=Factory(lambda self: PlannedWindow(self.size), takes_self=True))
    outcomes: dict[int, list[float] | PoolServeError] = field(init=False, factory=dict)
    """For each member that was not cancelled, the lengths of its rows as the runner has seen them, or its error."""
    scope: trio.CancelScope = field(init=False, factory=trio.CancelScope)
    """That of ``submit_cancellable``."""

    async def submit(self, index: int, *rows: PoolingRequest) -> None:
        with self.window.members[index] as member:
            try:
                outputs = await member.submit_all(self.engine, rows)
            except PoolServeError as error:
                self.outcomes[index] = error
            else:
                self.outcomes[index] = [output.values[0][0] for output in outputs]

    async def submit_cancellable(self, index: int, *rows: PoolingRequest) -> None:
        with self.scope:
            await self.submit(index, *rows)


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
