"""The rows of a table are computed a window at a time: the interface of a model in this process and of a server."""

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence

import trio
from attrs import define

from trio_pool_serve.bulk.bulk_options import TextOptions
from trio_pool_serve.bulk.table_task import TaskOptions, Values
from trio_pool_serve.errors import PoolServeError, UnavailableError, unwrap_exception_groups
from trio_pool_serve.runs.run import Computer, WindowResult
from trio_pool_serve.runs.tables.input_rows import InputRow
from trio_pool_serve.runs.tables.output_rows import OutputColumn, RowResult


async def compute_parts(
    count: int, compute: Callable[[int], Awaitable[WindowResult[RowResult]]]
) -> WindowResult[RowResult]:
    """Return the results of consecutive parts, computed at the same time, as one.

    Raises and is cancelled as ``compute``, which takes the index of a part.
    """
    results = [WindowResult[RowResult]([])] * count

    async def compute_part(index: int) -> None:
        results[index] = await compute(index)

    with unwrap_exception_groups(PoolServeError):
        async with trio.open_nursery() as nursery:
            for index in range(count):
                nursery.start_soon(compute_part, index)
    return WindowResult.joined(results)


async def compute_halving(
    rows: Sequence[InputRow],
    compute: Callable[[Sequence[Values]], Awaitable[tuple[list[Values], int]]],
    faults: tuple[type[PoolServeError], ...],
) -> WindowResult[RowResult]:
    """Compute rows; if that fails with one of the ``faults``, both halves, down to the row at fault.

    ``compute`` returns the output's values for rows with these input values, and the number of tokens computed.
    Raises ``UnavailableError``, and the errors of ``compute`` other than ``faults``. Cancellation: as ``compute``.
    """
    try:
        values, tokens = await compute([row.values for row in rows])
    except UnavailableError:
        raise
    except faults as error:
        if len(rows) == 1:
            return WindowResult([RowResult(error=str(error))])
    else:
        return WindowResult([RowResult(of_row) for of_row in values], tokens)
    middle = len(rows) // 2
    return WindowResult.joined(
        [await compute_halving(half, compute, faults) for half in (rows[:middle], rows[middle:])]
    )


@define(eq=False)
class TableComputer(Computer[InputRow, RowResult]):
    """Computes rows of a table: with a model in this process, or by a server."""

    task: TaskOptions
    text: TextOptions
    columns: Sequence[OutputColumn]
    """The columns of the output for ``RowResult.values``."""

    def parts_of(self, rows: Sequence[InputRow], size: int) -> list[Sequence[InputRow]]:
        """Return rows in parts of at most ``size``; each row of a ranking is a part."""
        step = 1 if self.task.record.is_ranking else size
        return [rows[begin : begin + step] for begin in range(0, len(rows), step)]

    @abstractmethod
    async def identity(self) -> dict[str, str]:
        """Return the properties that decide the numbers, by name; the journal keeps them. Cancellation: at once."""

    def refused(self, row: InputRow) -> RowResult:
        """Return the error of a row."""
        return RowResult(error=row.error)

    def died(self, row: InputRow) -> RowResult:
        """Return the error of a row that ends engine processes."""
        del row
        return RowResult(error="The engine process died while it computed this row.")
