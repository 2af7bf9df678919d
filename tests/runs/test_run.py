"""A run computes windows at the same time; if an engine process dies, the row at fault fails alone."""

from contextlib import nullcontext

import trio
from attrs import frozen

from trio_pool_serve.errors import EngineLoadingError, EngineProcessDiedError
from trio_pool_serve.runs.run import Computer, Position, Sink, Window, WindowResult, run_windows
from trio_pool_serve.threads.offload import Offload

ROWS, POISON = 1024, 700


@frozen
class Row:
    number: int
    error: str = ""


@frozen
class Result:
    number: int
    has_failed: bool = False


class DyingEngine(Computer[Row, Result]):
    """Dies with all rows that are computed at the time when it gets the poison, and is away for 3 s then."""

    def __init__(self) -> None:
        self.ready_at = 0.0
        self.computing: list[trio.Event] = []

    async def compute(self, rows):
        if trio.current_time() < self.ready_at:
            raise EngineLoadingError("The model is being loaded.")
        died = trio.Event()
        self.computing.append(died)
        try:
            with trio.move_on_after(0.005 * len(rows) + 0.01):
                if any(row.number == POISON for row in rows):
                    await trio.sleep(0.004)
                    self.ready_at = trio.current_time() + 3
                    for each in self.computing:
                        each.set()
                await died.wait()
        finally:
            self.computing.remove(died)
        if died.is_set():
            raise EngineProcessDiedError("The engine process died; another one is being started.")
        return WindowResult([Result(row.number) for row in rows])

    def refused(self, row):
        return Result(row.number, has_failed=True)

    def died(self, row):
        return Result(row.number, has_failed=True)


class List(Sink[Row, Result]):
    def __init__(self) -> None:
        self.results: list[Result] = []

    def write(self, rows, results) -> None:
        self.results += results

    def commit(self, position):
        return position


async def test_rows_computed_beside_one_that_ends_engine_processes_do_not_fail(autojump_clock):
    def windows(position):
        for begin in range(position.line, ROWS, 256):
            yield Window([Row(number) for number in range(begin, begin + 256)], begin + 256)

    async def commit(_: Position) -> None:
        await trio.lowlevel.checkpoint()

    written = List()
    position = await run_windows(
        Position(),
        windows=windows,
        computer=DyingEngine(),
        open_sink=lambda _: nullcontext(written),
        commit=commit,
        offload=Offload(in_threads=False),
        should_pause=lambda: False,
    )
    assert [result.number for result in written.results] == list(range(ROWS))
    assert [result.number for result in written.results if result.has_failed] == [POISON]
    assert (position.done, position.failed, position.is_finished) == (ROWS, 1, True)
