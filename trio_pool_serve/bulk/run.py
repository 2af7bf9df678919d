"""A run: an input is read, computed in windows, and written in order, with a commit after each window or part."""

from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import aclosing
from functools import partial

import msgspec
import trio
from attrs import define, evolve, field

from trio_pool_serve.bulk.bulk_options import RunOptions, TaskOptions
from trio_pool_serve.bulk.row_results import Computer, RowResult, WindowResult
from trio_pool_serve.bulk.run_progress import RunProgress
from trio_pool_serve.errors import BulkRowError, EngineDeadError, UnavailableError
from trio_pool_serve.runs.journal import Journal
from trio_pool_serve.runs.tables.input_rows import InputRow
from trio_pool_serve.runs.tables.input_table import InputTable
from trio_pool_serve.runs.tables.output_table import OutputTable
from trio_pool_serve.storage.durable_files import AppendedFile
from trio_pool_serve.threads.offload import Offload

WINDOW_ROWS = 2048
WINDOW_CHARACTERS = 4 * 2**20
"""A window ends with the row by which it has so many: with more rows, those of one batch differ less in length."""

WINDOWS_AT_ONCE = 2
"""Windows that are computed or wait to be written: while one ends, the device has rows of the next."""

CLOSE_TIMEOUT_S = 5.0
"""For closing files, which is short once no thread reads or writes them."""

RETRY_PAUSES_S = (1.0, 2.0, 5.0, 15.0, 30.0, 60.0)
"""Before a window is computed again, while no engine is ready."""


@define(eq=False)
class Window:
    """Consecutive rows of a run; ``next_row`` is the number of the input's row after it."""

    rows: list[InputRow]
    next_row: int
    ends_part: bool
    """Whether a file of the output ends with it."""
    result: WindowResult = field(init=False)
    computed: trio.Event = field(init=False, factory=trio.Event)


async def compute_window(computer: Computer, rows: Sequence[InputRow], note: Callable[[str], None]) -> WindowResult:
    """Compute a window: rows that cannot be used keep their error, the others are computed.

    While no engine is ready they are computed again after a pause, which ``note`` is told about. Raises
    ``EngineDeadError``, and ``UnavailableError`` if no engine has become ready. Cancellation: at once.
    """
    usable = [row for row in rows if not row.error]
    for pause_s in (*RETRY_PAUSES_S, None):
        try:
            result = await computer.compute(usable)
            break
        except UnavailableError as error:
            if pause_s is None or isinstance(error, EngineDeadError):
                raise
            note(f"{error} The rows are computed again in {pause_s:g} s.")
            await trio.sleep(pause_s)
    computed = iter(result.rows)
    results = [RowResult(error=row.error) if row.error else next(computed) for row in rows]
    return WindowResult(results, result.tokens)


@define(eq=False)
class BulkRun:
    """Computes what is left of a run.

    The windows depend on the input and on the options alone, and a run is resumed where one begins: so the bytes of the
    output do not depend on how often it was stopped. At most ``WINDOWS_AT_ONCE`` windows are in memory, and as many are
    read ahead or written.
    """

    table: InputTable
    output: OutputTable
    errors: AppendedFile | None
    computer: Computer
    journal: Journal
    task: TaskOptions
    options: RunOptions
    offload: Offload
    progress: RunProgress
    in_parts: bool
    """Whether the output is a folder of files with ``rows_per_file`` rows of the input each."""
    stop: trio.Event
    """Set to stop: windows that are computed are still written."""

    async def run(self) -> None:
        """Compute, write and commit all rows, or those of the windows that are begun when ``stop`` is set.

        Raises ``BulkRowError`` for a row that fails with ``--on-error fail``, and what reading, computing and writing
        raise. Cancellation: at once, but for a window that is being written; what was committed stays.
        """
        async with trio.open_nursery() as nursery:
            send, receive = trio.open_memory_channel[Window](WINDOWS_AT_ONCE - 1)
            nursery.start_soon(self._write_all, receive)
            async with send, aclosing(self._windows()) as windows:
                async for window in windows:
                    await send.send(window)
                    nursery.start_soon(self._compute, window)

    async def _compute(self, window: Window) -> None:
        window.result = await compute_window(self.computer, window.rows, self.progress.note)
        window.computed.set()

    async def _windows(self) -> AsyncGenerator[Window, None]:
        """Yield windows until there are no more rows, or ``stop`` is set.

        Raises ``InputChangedError`` in place of a window if the input was changed since its scan.
        """
        start = self.journal.progress.next_row
        windows = self._cut(self.table.rows(self.task.columns, self.options.id_column, start), start)
        try:
            while not self.stop.is_set():
                window = await self.offload.run("files", partial(next, windows, None))
                if window is None:
                    return
                yield window
        finally:
            with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                await self.offload.run("files", windows.close)

    def _cut(self, every: Iterator[InputRow], start: int) -> Generator[Window, None, None]:
        """Cut rows into windows. Blocking."""
        (shard, shards), limit, per_file = self.options.shard_of_rows, self.options.limit, self.options.rows_per_file
        rows: list[InputRow] = []
        characters, number = 0, start - 1
        for row in every:
            if limit is not None and row.number >= limit:
                self.table.check_read()
                yield Window(rows, limit, ends_part=True)
                return
            number = row.number
            if number % shards == shard:
                rows.append(row)
                characters += _characters(row)
            ends_part = self.in_parts and (number + 1) % (shards * per_file) == 0
            if ends_part or _is_full(rows, characters):
                self.table.check_read()
                yield Window(rows, number + 1, ends_part)
                rows, characters = [], 0
        self.table.check_unchanged()
        if number >= start:
            yield Window(rows, number + 1, ends_part=True)

    async def _write_all(self, windows: trio.MemoryReceiveChannel[Window]) -> None:
        progress = self.journal.progress
        async for window in windows:
            await window.computed.wait()
            failed = sum(bool(row.error) for row in window.result.rows)
            progress = evolve(
                progress,
                next_row=window.next_row,
                done=progress.done + len(window.rows),
                failed=progress.failed + failed,
                tokens=progress.tokens + window.result.tokens,
            )
            commits = window.ends_part or not self.in_parts
            written, error_bytes = await self.offload.run("files", partial(self._write, window, commits=commits))
            if commits:
                await self.journal.commit(evolve(progress, output=written, error_bytes=error_bytes))
            self.progress.show(progress)
        if self.stop.is_set():
            return
        written = msgspec.json.encode(await self.offload.run("files", self.output.finish))
        committed = evolve(progress, output=written, error_bytes=self.errors.length if self.errors else 0)
        await self.journal.commit(evolve(committed, is_finished=True))

    def _write(self, window: Window, *, commits: bool) -> tuple[bytes | None, int]:
        """Write the results of a window, and make them durable if it ``commits``. Blocking."""
        rows: list[tuple[object, ...]] = []
        errors: list[bytes] = []
        for row, result in zip(window.rows, window.result.rows, strict=True):
            if not result.error:
                rows.append((row.id, *result.values))
                continue
            if self.options.on_error == "fail":
                raise BulkRowError(f"{row.place}, id {row.id!r}: {result.error}")
            if self.options.on_error == "null":
                rows.append((row.id, *(None for _ in self.computer.columns)))
            errors.append(msgspec.json.encode({"line": row.place, "id": row.id, "reason": result.error}) + b"\n")
        self.output.write(rows)
        if self.errors is not None and errors:
            self.errors.append(b"".join(errors))
        if not commits:
            return None, 0
        return msgspec.json.encode(self.output.commit()), self.errors.sync() if self.errors is not None else 0


def cut_windows(rows: Iterable[InputRow]) -> Iterator[list[InputRow]]:
    """Yield rows of a table that is in memory in windows, as a run has them."""
    window: list[InputRow] = []
    characters = 0
    for row in rows:
        window.append(row)
        characters += _characters(row)
        if _is_full(window, characters):
            yield window
            window, characters = [], 0
    if window:
        yield window


def _is_full(rows: Sequence[InputRow], characters: int) -> bool:
    return len(rows) >= WINDOW_ROWS or characters >= WINDOW_CHARACTERS


def _characters(row: InputRow) -> int:
    return sum(
        len(value) if isinstance(value, str) else sum(len(part) for part in value if isinstance(part, str))
        for value in row.values
        if isinstance(value, str | list)
    )
