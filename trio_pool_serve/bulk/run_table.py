"""The commands for tables, from their options to the exit status."""

import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import evolve
from rich.console import Console

from trio_pool_serve.bulk.bulk_options import (
    OwnModelOptions,
    RunOptions,
    TextOptions,
    errors_path,
    journal_path,
)
from trio_pool_serve.bulk.earlier_output import check_output, files_of_run
from trio_pool_serve.bulk.remote_server import open_remote_server
from trio_pool_serve.bulk.run_progress import scanning, showing
from trio_pool_serve.bulk.table_task import TableComputer, TaskOptions
from trio_pool_serve.errors import BulkInputError, BulkRowError, PoolServeError, unwrap_exception_groups
from trio_pool_serve.processes.signals import stop_signals
from trio_pool_serve.runs.journal import ON_ERROR, Identity, Journal, open_journal
from trio_pool_serve.runs.run import Position, run_windows
from trio_pool_serve.runs.tables.input_table import open_input
from trio_pool_serve.runs.tables.output_rows import OutputColumn, divided
from trio_pool_serve.runs.tables.output_table import ResultFiles, check_finished, open_output
from trio_pool_serve.runs.tables.table_formats import Format, check_packages, format_of
from trio_pool_serve.runs.tables.table_windows import table_windows, window_characters
from trio_pool_serve.threads.offload import Offload

ROWS_FAILED = 3
"""Exit status when rows have failed."""

STOPPED = 128 + signal.SIGINT
"""Exit status of a run that a signal has stopped."""


async def run_command(
    source: str, target: str, task: TaskOptions, run: RunOptions, text: TextOptions, own: OwnModelOptions
) -> int:
    """Compute ``source`` into ``target``; return the exit status: 0, 1 for errors, 3 if rows failed, 130 if stopped.

    Cancellation: at once; committed rows stay.
    """
    opened = partial(_computer, task, run, text, own)
    return await exit_status(lambda console: run_table(source, target, task, run, text, opened, console, stop_signals))


async def exit_status(compute: Callable[[Console], Awaitable[Position]]) -> int:
    """Return the exit status of a run, whose errors are printed. Cancellation: as ``compute``."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        with unwrap_exception_groups(BulkRowError, PoolServeError, OSError):
            position = await compute(console)
    except (PoolServeError, OSError) as error:
        console.print(f"trio-pool-serve: {error}", style="red", markup=False)
        return ROWS_FAILED if isinstance(error, BulkRowError) else 1
    if not position.is_finished:
        return STOPPED
    return ROWS_FAILED if position.failed else 0


async def complete_run(
    title: str,
    total: int | None,
    journal: Journal,
    stop: trio.Event,
    console: Console,
    *,
    check: Callable[[Position], Awaitable[None]],
    finish: Callable[[Position], Awaitable[None]],
    **parts: Any,
) -> Position:
    """Compute the rest of a run, and show its progress; return the last position.

    ``parts`` are arguments of ``run_windows``. Once all rows are written, ``finish`` commits the last position. If the
    run was complete before, ``check`` looks for its output. Raises and is cancelled as these two and ``run_windows``.
    """
    if journal.position.is_finished:
        await check(journal.position)
        return journal.position
    with showing(title, total, journal.position, console) as progress:
        try:
            position = await run_windows(
                journal.position, should_pause=stop.is_set, on_progress=progress.show, note=progress.note, **parts
            )
        except BulkRowError as error:
            if not journal.is_kept:
                raise
            raise BulkRowError(f"{error} To resume at this row, add --on-error null or --on-error skip.") from error
    console.print(f"{title}: {progress.counts(position if position.is_finished else journal.position)}", markup=False)
    if position.is_finished:
        await finish(position)
    else:
        next_run = "resumes" if journal.is_kept else "starts again: with standard input or output, no journal is kept"
        console.print(f"Stopped. The same command {next_run}.", markup=False)
    return position


async def run_table(
    source: str,
    target: str,
    task: TaskOptions,
    run: RunOptions,
    text: TextOptions,
    open_computer: Callable[[], AbstractAsyncContextManager[TableComputer]],
    console: Console,
    stopping: Callable[[], AbstractAsyncContextManager[trio.Event]],
) -> Position:
    """Compute the rest of a run, whose journal is beside ``target``; return its last position.

    The event of ``stopping()``, which is called once the input is open, ends the run early. Raises ``BulkRowError`` for
    a row that fails if ``--on-error`` is ``fail``, ``PoolServeError`` and ``OSError``, perhaps in groups.
    Cancellation: at once; committed rows stay.
    """
    offload = Offload()
    path = None if target == "-" else Path(target)
    table = await offload.run("files", lambda: open_input(source, format=run.input_format, left_out=files_of_run(path)))
    format = format_of(target, run.output_format) if path else format_of("stdout", run.output_format or "jsonl")  # noqa: A001
    keeps_journal = path is not None and not table.is_stdin
    await offload.run("files", partial(check_packages, table.format, format))
    if path is not None:
        await offload.run(
            "files",
            partial(
                check_output,
                path,
                inputs=[file.path for file in table.files if file.path is not None],
                overwrite=run.overwrite,
                in_parts=not format.in_lines,
                keeps_journal=keeps_journal,
                beside=(errors_path(path),),
            ),
        )
    async with AsyncExitStack() as stack:
        stop = await stack.enter_async_context(stopping())
        with scanning(console, table.n_bytes) as show:
            fingerprint = await offload.run("files", partial(table.scan, show))
        computer = await stack.enter_async_context(open_computer())
        identity = Identity(
            input=fingerprint,
            arguments=_arguments(task, run, text, table.format, format),
            model=await computer.identity(),
        )
        journal = await stack.enter_async_context(
            open_journal(journal_path(path) if path and keeps_journal else None, identity)
        )

        async def check(position: Position) -> None:
            await offload.run("files", partial(check_finished, Path(target), format, position))
            console.print(f"{target} is complete: {position.done:,} rows.", markup=False)

        async def finish(position: Position) -> None:
            await journal.commit(position)
            if path is not None and run.on_error != "fail" and not position.failed:
                await offload.run("files", errors_path(path).unlink)

        numbers, rows = run.numbers, fingerprint.rows
        return await complete_run(
            task.task,
            None if rows is None else len(range(numbers.start, min(numbers.stop, rows), numbers.step)),
            journal,
            stop,
            console,
            check=check,
            finish=finish,
            windows=partial(
                table_windows,
                table=table,
                columns=task.columns,
                id_column=run.id_column,
                numbers=numbers,
                rows_per_part=None if format.in_lines else run.rows_per_file,
                characters=window_characters(computer.columns),
            ),
            computer=computer,
            open_sink=partial(
                ResultFiles.open,
                partial(open_output, path, format, [OutputColumn("id", "string"), *computer.columns]),
                None if path is None or run.on_error == "fail" else errors_path(path),
                partial(divided, run.on_error, (None,) * len(computer.columns)),
            ),
            commit=journal.commit,
            offload=offload,
        )


def _computer(
    task: TaskOptions, run: RunOptions, text: TextOptions, own: OwnModelOptions
) -> AbstractAsyncContextManager[TableComputer]:
    if run.url is not None:
        return open_remote_server(evolve(run, api_key=run.api_key or os.environ.get("OPENAI_API_KEY")), task, text)
    from trio_pool_serve.bulk.own_engine import open_own_engine  # imported here: with --url it is not needed

    if run.model is None:
        raise BulkInputError("--model or --url is missing: name a model to load, or a server to use.")
    return open_own_engine(run.model, own, task, text)


def _arguments(
    task: TaskOptions,
    run: RunOptions,
    text: TextOptions,
    input_format: Format,
    format: Format,  # noqa: A002
) -> dict[str, str | int | bool | None]:
    """Return the arguments on which the bytes of the output depend."""
    return {
        "the command": task.task,
        "--column": ",".join(task.columns),
        "--input-format": str(input_format),
        "--id": run.id_column,
        "--dimensions": task.dimensions,
        "--dtype": task.dtype,
        "--top-n": task.top_n,
        "--prompt-name": text.prompt_name,
        "--input-type": text.input_type,
        "--truncate": text.truncate,
        ON_ERROR: run.on_error,
        "--shard": run.shard,
        "--limit": run.limit,
        "--rows-per-file": None if format.in_lines else run.rows_per_file,
        "--output-format": str(format),
    }
