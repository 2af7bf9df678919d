"""Runs of the bulk commands as rows of a data set: each has a journal, so all of them are resumable."""

from contextlib import nullcontext
from functools import partial
from typing import Any, Unpack

import pyarrow as pa
import trio
from attrs import evolve
from rich.console import Console

from trio_pool_serve.bulk.bulk_options import RunOptions, TextOptions, VectorFormat
from trio_pool_serve.bulk.own_engine import OwnEngine
from trio_pool_serve.bulk.run_table import run_table
from trio_pool_serve.bulk.table_task import TABLE_TASKS, TaskName, TaskOptions
from trio_pool_serve.errors import (
    EngineDeadError,
    PoolServeError,
    StorageInUseError,
    UnavailableError,
    require,
    unwrap_exception_groups,
)
from trio_pool_serve.ray_data.actor_engine import EngineOptions, WithEngine, checked
from trio_pool_serve.ray_data.batch_tables import as_table, check_columns
from trio_pool_serve.runs.run import OnError, Position
from trio_pool_serve.runs.tables.arrow_rows import check_value, objects_of

IN_USE_PAUSES_S = (1.0, 2.0, 5.0, 15.0, 30.0)
"""Pauses for another actor, which may run for some seconds after Ray has given it up or its driver was killed."""

ADDED = {"rows": pa.int64(), "failed": pa.int64(), "tokens": pa.int64(), "error": pa.string()}


class BulkRuns(WithEngine):
    """Computes a file of texts into one of results for each row, as the bulk command of that name does.

    A row has strings: ``source`` and ``target``, which are the command's arguments, and in a column ``shard``, if there
    is one, its ``--shard``, such as ``3/16``. Use it with ``batch_size=1``. The journal beside ``target`` has the
    position of a run: a killed run resumes after its last commit when the row is computed again, by another actor,
    by another job or by the command, and one that is complete is not computed again. So no row of a source is missing
    in the target, and none is twice in it.

    Adds ``rows``, ``failed`` and ``tokens`` (int64), the totals of the target, and ``error``, the reason if the run
    could not be completed; then the other three are null. ``columns`` are by default ``text``, or ``query`` and
    ``document`` or ``documents``. ``on_error`` is for rows of a source: written with null, left out, or the run's end.

    Raises as ``Embed`` does.
    """

    def __init__(
        self,
        command: TaskName,
        model: str,
        columns: tuple[str, ...] | None = None,
        *,
        dimensions: int | None = None,
        dtype: VectorFormat = "float32",
        top_n: int | None = None,
        id_column: str | None = None,
        on_error: OnError = "null",
        rows_per_file: int = 8192,
        **options: Unpack[EngineOptions],
    ) -> None:
        require(command in TABLE_TASKS, f"Unknown command {command!r}; accepted: {', '.join(TABLE_TASKS)}.", ValueError)
        expected = TABLE_TASKS[command].columns
        columns = expected if columns is None else tuple(columns)
        require(
            len(columns) == len(expected),
            f"columns is {columns!r}; {command} takes {len(expected)}, such as {expected!r}.",
            ValueError,
        )
        self._run = checked(
            RunOptions, model=model, id_column=id_column, on_error=on_error, rows_per_file=rows_per_file
        )
        super().__init__(model, options, task=command, columns=columns, dimensions=dimensions, dtype=dtype, top_n=top_n)

    def __call__(self, batch: Any) -> Any:
        """Return the batch with the results of its runs. Blocks until they are complete, one after the other."""
        table = as_table(batch)
        check_columns(table, ("source", "target"), tuple(ADDED))
        wanted = [name for name in ("source", "target", "shard") if name in table.column_names]
        values = zip(*[objects_of(table.column(name)) for name in wanted], strict=True)
        rows = [self._complete(**dict(zip(wanted, of_row, strict=True))) for of_row in values]
        for name, kind in ADDED.items():
            table = table.append_column(name, pa.array([row.get(name) for row in rows], kind))
        return table

    def _complete(self, source: Any, target: Any, shard: Any = None) -> dict[str, Any]:
        try:
            for name, value in (("source", source), ("target", target), ("shard", shard)):
                if value is not None:
                    check_value(value, name)
            run = self._run if shard is None else evolve(self._run, shard=shard)
            source, target = _path("source", source), _path("target", target)
            after = self._call(partial(_run, source=source, target=target, task=self._task, run=run, text=self._text))
        except (EngineDeadError, UnavailableError):
            raise  # the row can be computed, by another engine
        except (PoolServeError, OSError, ValueError, TypeError) as error:
            return {"error": str(error.args[0]) if isinstance(error, ValueError) and error.args else str(error)}
        return {"rows": after.done, "failed": after.failed, "tokens": after.tokens}


def _path(name: str, value: Any) -> str:
    if not isinstance(value, str) or value in ("", "-"):
        raise ValueError(f"{name} is {value!r}, but must be a path.")
    return value


async def _run(
    engine: OwnEngine, source: str, target: str, task: TaskOptions, run: RunOptions, text: TextOptions
) -> Position:
    console, opened, never = Console(quiet=True), nullcontext(engine), nullcontext(trio.Event())  # Ray shows progress
    for pause_s in (*IN_USE_PAUSES_S, None):
        try:
            with unwrap_exception_groups(PoolServeError, OSError):
                return await run_table(source, target, task, run, text, lambda: opened, console, lambda: never)
        except StorageInUseError:
            if pause_s is None:
                raise
        await trio.sleep(pause_s)
    raise AssertionError  # the last pause is None
