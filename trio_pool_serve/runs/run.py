"""A run: the rows of a source are computed in windows, and written to a sink in their order, each exactly once."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, closing
from functools import partial
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

import trio
from attrs import define, evolve, field, frozen

from trio_pool_serve.errors import (
    EngineDeadError,
    EngineProcessDiedError,
    PoolServeError,
    UnavailableError,
    unwrap_exception_groups,
)
from trio_pool_serve.threads.offload import Offload

WINDOWS_AT_ONCE = 3
"""Windows that have been read and are not committed: while one is written, the device has rows of two others. With two,
a table of short texts took 2 % longer (MiniLM, two cores)."""

RETRY_PAUSES_S = (0.1, 0.5, 1.0, 2.0, 5.0, 5.0, 10.0, 10.0, 20.0, 30.0, 30.0)
"""Pauses before a window is computed again while no engine is ready: loading a large model takes up to two minutes."""

SHOWN_PAUSE_S = 1.0
"""Pauses from this length on are reported."""

MAX_DEATHS = 2
"""If the engine process dies this often during a window, its rows are computed one by one, to find the one at fault."""

CLOSE_TIMEOUT_S = 5.0
"""Time limit for closing files, which is short once no thread reads or writes them."""

OnError: TypeAlias = Literal["fail", "null", "skip"]
"""The policy for a row that cannot be computed: end the run, write it without a result, or leave it out."""


class Readable(Protocol):
    """A row of a source: with an ``error``, it is not computed."""

    @property
    def error(self) -> object:
        """Why the row cannot be used; false if it can."""


class Written(Protocol):
    """The result of a row."""

    @property
    def has_failed(self) -> bool:
        """Whether the row counts as failed."""


Row = TypeVar("Row", bound=Readable)
Result = TypeVar("Result", bound=Written)


@frozen
class Position:
    """The progress of a run: all rows before the position are on disk, and rows after it do not count.

    The next window begins with the row number ``line`` (from 0), in a file of requests at byte ``offset``. The output
    has ``output_bytes``, in ``parts`` files if it is a folder, and the file of errors ``error_bytes``. ``is_finished``
    is set once the source has ended and nothing is left to do.
    """

    line: int = 0
    offset: int = 0
    output_bytes: int = 0
    error_bytes: int = 0
    completed: int = 0
    failed: int = 0
    tokens: int = 0
    parts: int = 0
    is_finished: bool = False

    @property
    def done(self) -> int:
        """Number of rows that have been written."""
        return self.completed + self.failed


@frozen
class Window(Generic[Row]):
    """Consecutive rows, and where the next window begins; ``commits``: the output is committed after it.

    Where windows end depends on the source only, so a resumed run has the same windows.
    """

    rows: Sequence[Row]
    next_line: int
    next_offset: int = 0
    commits: bool = True


@frozen(eq=False)
class WindowResult(Generic[Result]):
    """The results of consecutive rows, in their order, and the number of tokens computed."""

    rows: Sequence[Result]
    tokens: int = 0

    @classmethod
    def joined(cls, parts: "Sequence[WindowResult[Result]]") -> "WindowResult[Result]":
        """Return the results of consecutive parts as one."""
        return cls([row for part in parts for row in part.rows], sum(part.tokens for part in parts))


class Computer(ABC, Generic[Row, Result]):
    """Computes rows."""

    @abstractmethod
    async def compute(self, rows: Sequence[Row]) -> WindowResult[Result]:
        """Compute the rows of a window that have no error.

        With a model of this process, the same rows give the same bytes.
        Raises ``UnavailableError`` if nothing can be computed now, and ``PoolServeError`` if the run cannot continue; a
        row that cannot be computed has a result with an error. Cancellation: at once.
        """

    @abstractmethod
    def refused(self, row: Row) -> Result:
        """Return the result of a row that has an error."""

    @abstractmethod
    def died(self, row: Row) -> Result:
        """Return the result of a row that ends each engine process it is sent to."""


class Sink(ABC, Generic[Row, Result]):
    """Where results are written. All methods block and raise ``StorageError``."""

    @abstractmethod
    def write(self, rows: Sequence[Row], results: Sequence[Result]) -> None:
        """Write the results of a window."""

    @abstractmethod
    def commit(self, position: Position) -> Position:
        """Make everything written durable; return the position with the sizes of the files.

        A finished position completes the output.
        """


def ignore(_: object) -> None:
    """Do nothing: the default callback."""


@define(eq=False)
class _Computing(Generic[Row, Result]):
    window: Window[Row]
    before: trio.Event | None
    """Set once the window before it is computed."""
    result: WindowResult[Result] = field(init=False)
    is_done: trio.Event = field(init=False, factory=trio.Event)

    async def compute(self, computer: Computer[Row, Result], note: Callable[[str], None]) -> None:
        self.result = await compute_window(computer, self.window.rows, note, self.before)
        self.is_done.set()


async def run_windows(
    position: Position,
    *,
    windows: Callable[[Position], Generator[Window[Row], None, None]],
    computer: Computer[Row, Result],
    open_sink: Callable[[Position], AbstractContextManager[Sink[Row, Result]]],
    commit: Callable[[Position], Awaitable[None]],
    offload: Offload,
    should_pause: Callable[[], bool],
    on_progress: Callable[[Position], None] = ignore,
    note: Callable[[str], None] = ignore,
) -> Position:
    """Compute, write and commit the windows of a run from a position on; return the last position.

    ``windows`` yields them, and blocks while it reads. ``open_sink`` opens the sink at a position, at which it cuts off
    its files, for a block, and blocks, at the end as well. At most ``WINDOWS_AT_ONCE`` windows are read, computed and
    written at a time; none is begun while ``should_pause()``. After each one that commits, the sink makes its files
    durable, and then ``commit`` stores the position. A run that is interrupted at any moment resumes at the last
    position; results after it are removed. ``on_progress`` is called with the position after each window, committed or
    not, and ``note`` with a sentence when the run waits for an engine.

    The last position is finished if the source has ended; then the caller commits it. Raises the errors of reading,
    computing, writing and ``commit``. Cancellation: as soon as a thread that reads or writes has finished; windows that
    are not committed do not count.
    """
    computing: deque[_Computing[Row, Result]] = deque()
    has_ended = False
    with unwrap_exception_groups(PoolServeError):
        async with _opened(position, windows, open_sink, offload) as (source, sink), trio.open_nursery() as nursery:
            while True:
                while len(computing) < WINDOWS_AT_ONCE and not has_ended and not should_pause():
                    window = await offload.run("files", partial(next, source, None))
                    has_ended = window is None
                    if window is not None:
                        computing.append(_Computing(window, before=computing[-1].is_done if computing else None))
                        nursery.start_soon(computing[-1].compute, computer, note)
                if not computing:
                    break
                first = computing.popleft()
                await first.is_done.wait()
                position = await offload.run("files", partial(_write, sink, position, first))
                if first.window.commits:
                    await commit(position)
                on_progress(position)
            if has_ended:
                position = await offload.run("files", partial(sink.commit, evolve(position, is_finished=True)))
    return position


@asynccontextmanager
async def _opened(
    position: Position,
    windows: Callable[[Position], Generator[Window[Row], None, None]],
    open_sink: Callable[[Position], AbstractContextManager[Sink[Row, Result]]],
    offload: Offload,
) -> AsyncIterator[tuple[Generator[Window[Row], None, None], Sink[Row, Result]]]:
    """Open the sink and the source for a block. Cancellation: as ``run_windows``."""
    files = ExitStack()
    try:
        sink = await offload.run("files", lambda: files.enter_context(open_sink(position)))
        yield files.enter_context(closing(windows(position))), sink
    finally:
        with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await offload.run("files", files.close)


def _write(sink: Sink[Row, Result], position: Position, computed: _Computing[Row, Result]) -> Position:
    """Write a window, and commit it if that is its end; return the position after it. Blocks."""
    window, results = computed.window, computed.result.rows
    sink.write(window.rows, results)
    failed = sum(result.has_failed for result in results)
    position = evolve(
        position,
        line=window.next_line,
        offset=window.next_offset,
        completed=position.completed + len(results) - failed,
        failed=position.failed + failed,
        tokens=position.tokens + computed.result.tokens,
    )
    return sink.commit(position) if window.commits else position


async def compute_window(
    computer: Computer[Row, Result],
    rows: Sequence[Row],
    note: Callable[[str], None] = ignore,
    before: trio.Event | None = None,
) -> WindowResult[Result]:
    """Compute a window, and again after a pause while no engine is ready; rows with an error keep it.

    Once an engine process has died, ``before`` is waited for: a row of the window before may have ended the process.
    Raises ``EngineDeadError``, and ``UnavailableError`` if no engine has become ready. Cancellation: at once.
    """
    usable = [row for row in rows if not row.error]
    result = await _compute_once_available(computer, usable, note, before) if usable else WindowResult[Result]([])
    computed = iter(result.rows)
    return WindowResult([computer.refused(row) if row.error else next(computed) for row in rows], result.tokens)


async def _compute_once_available(
    computer: Computer[Row, Result], rows: Sequence[Row], note: Callable[[str], None], before: trio.Event | None
) -> WindowResult[Result]:
    deaths = 0
    for pause_s in (*RETRY_PAUSES_S, None):
        try:
            return await computer.compute(rows)
        except UnavailableError as error:
            has_died = isinstance(error, EngineProcessDiedError)  # another process is being started
            deaths += has_died
            if has_died and before is not None:
                await before.wait()
            if deaths == MAX_DEATHS:
                break
            if pause_s is None or (isinstance(error, EngineDeadError) and not has_died):
                raise
            if pause_s >= SHOWN_PAUSE_S:
                note(f"{error} Retrying these rows in {pause_s:g} s.")
            await trio.sleep(pause_s)
    if len(rows) == 1:
        return WindowResult([computer.died(rows[0])])
    return WindowResult.joined([await _compute_once_available(computer, [row], note, None) for row in rows])
