"""A run over a file of requests: responses in the order of its lines, and it is known what of them is on the disk."""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeAlias

import trio
from attrs import define, evolve, field, frozen

from trio_pool_serve.errors import EngineProcessDiedError, PoolServeError, UnavailableError, unwrap_exception_groups
from trio_pool_serve.runs.requests.batch_line import (
    BatchLine,
    LineError,
    RefusedLine,
    Window,
    read_window,
    request_id_of,
)
from trio_pool_serve.runs.requests.line_request import LineRequest, LineResponse, RespondAll, Submitter
from trio_pool_serve.storage.durable_files import AppendedFile, open_appended, storage_errors
from trio_pool_serve.threads.offload import Offload

MAX_COMPUTING = 2
"""Windows at a time: one is computed while the other is read or written."""

RETRY_S = (0.1, 0.5, 1.0, 2.0, 5.0, 5.0, 10.0, 10.0, 20.0, 30.0, 30.0)
"""Pauses before lines are computed again that the server could not compute: an engine process loads for so long."""

MAX_DEATHS = 2
"""An engine that dies while it computes a window, and again: then its lines are computed one by one, and one with which
it dies so often fails."""


ENGINE_DIED = LineResponse(
    500, b'{"error":{"message":"The engine died while it computed this line.","type":"InternalServerError","code":500}}'
)


@frozen
class Position:
    """How far a run has come: all before it is on the disk, nothing behind it counts.

    ``line`` and ``offset`` (bytes of the input) are where the next window begins; ``completed`` and ``failed`` are the
    lines with a response of status 200 and all others.
    """

    line: int = 0
    offset: int = 0
    output_bytes: int = 0
    error_bytes: int = 0
    completed: int = 0
    failed: int = 0
    tokens: int = 0


@frozen
class FinishedLine:
    """A line with its response, or with the error for which it has none."""

    custom_id: str | None
    request_id: str
    response: LineResponse | None = None
    error: LineError | None = None

    @property
    def is_completed(self) -> bool:
        """Whether its response has status 200."""
        return self.response is not None and self.response.status == 200


ComputeLines: TypeAlias = Callable[[Sequence[BatchLine | RefusedLine]], Awaitable[list[FinishedLine]]]
"""Returns the lines of one window, finished, in their order."""

WriteLine: TypeAlias = Callable[[FinishedLine], tuple[bytes, bool]]
"""Returns what is written for a line, and whether to the file of errors. Called in a thread."""

CommitPosition: TypeAlias = Callable[[Position], Awaitable[None]]
"""Makes a position durable: after it has returned, a run is resumed there."""


@frozen(eq=False, kw_only=True)
class LineRun:
    """What a run reads, how it computes, and where it writes.

    ``input`` must not change during the run. Without ``errors`` there is one output. ``on_progress`` is called with
    the number of lines that have just been committed. No window is begun while ``should_pause()``.
    """

    input: Path
    output: Path
    errors: Path | None = None
    compute: ComputeLines
    write: WriteLine
    commit: CommitPosition
    offload: Offload
    max_line_bytes: int
    on_progress: Callable[[int], None]
    should_pause: Callable[[], bool]


async def run_lines(run: LineRun, position: Position) -> bool:
    """Run the lines from a position, the last that was committed; return whether the end of the file was reached.

    The outputs are cut off where ``position`` says that they end. After each window they are synced, and then the next
    position is committed. Raises ``StorageError``, and what ``compute`` and ``commit`` raise. Cancellation: as soon as
    a thread that reads or writes has finished; a window that is not committed does not count.
    """
    with unwrap_exception_groups(PoolServeError), ExitStack() as opened:
        source, outputs = await run.offload.run("files", partial(_open_files, run, position, opened))
        async with trio.open_nursery() as nursery:
            return await _run_windows(run, position, source, outputs, nursery)
    raise AssertionError  # nothing is suppressed


async def _run_windows(
    run: LineRun, position: Position, source: BinaryIO, outputs: list[AppendedFile], nursery: trio.Nursery
) -> bool:
    computing: deque[_ComputingWindow] = deque()
    line, offset = position.line, position.offset
    has_ended = False
    while True:
        while len(computing) < MAX_COMPUTING and not has_ended and not run.should_pause():
            window = await run.offload.run("files", partial(_read, run, source, line, offset))
            if window is None:
                has_ended = True
                break
            line, offset = window.next_line, window.next_offset
            computing.append(_ComputingWindow(window))
            nursery.start_soon(computing[-1].compute, run.compute)
        if not computing:
            return has_ended
        first = computing.popleft()
        await first.done.wait()
        position = await run.offload.run("files", partial(_write, run, outputs, position, first))
        await run.commit(position)
        run.on_progress(len(first.lines))


@define(eq=False)
class _ComputingWindow:
    window: Window
    lines: list[FinishedLine] = field(init=False, factory=list)
    done: trio.Event = field(init=False, factory=trio.Event)

    async def compute(self, compute: ComputeLines) -> None:
        if self.window.lines:
            self.lines = await compute(self.window.lines)
        self.done.set()


def _open_files(run: LineRun, position: Position, opened: ExitStack) -> tuple[BinaryIO, list[AppendedFile]]:
    with storage_errors(run.input):
        source = opened.enter_context(run.input.open("rb"))
    outputs = [opened.enter_context(closing(open_appended(run.output, position.output_bytes)))]
    if run.errors is not None:
        outputs.append(opened.enter_context(closing(open_appended(run.errors, position.error_bytes))))
    return source, outputs


def _read(run: LineRun, source: BinaryIO, line: int, offset: int) -> Window | None:
    with storage_errors(run.input):
        return read_window(source, line, offset, run.max_line_bytes)


def _write(run: LineRun, outputs: list[AppendedFile], position: Position, finished: _ComputingWindow) -> Position:
    """Append a window's lines and sync; return the position behind it. Runs in a thread."""
    parts: list[list[bytes]] = [[] for _ in outputs]
    for line in finished.lines:
        data, is_error = run.write(line)
        parts[is_error and len(outputs) > 1].append(data)
    lengths = []
    for output, written in zip(outputs, parts, strict=True):
        if written:
            output.append(b"".join(written))
            output.sync()
        lengths.append(output.length)
    completed = sum(line.is_completed for line in finished.lines)
    return evolve(
        position,
        line=finished.window.next_line,
        offset=finished.window.next_offset,
        output_bytes=lengths[0],
        error_bytes=lengths[1] if len(lengths) > 1 else 0,
        completed=position.completed + completed,
        failed=position.failed + len(finished.lines) - completed,
        tokens=position.tokens + sum(line.response.tokens for line in finished.lines if line.response is not None),
    )


def compute_by(respond_all: RespondAll, submitter: Submitter, *, digest: str, created: int) -> ComputeLines:
    """Return a function that has lines computed by ``respond_all``, and again for two minutes while it cannot.

    ``digest`` is the SHA-256 of the input, of which ids are made, and ``created`` is in the bodies (seconds since the
    epoch). The function raises ``UnavailableError`` if that is not enough. Its cancellation: at once.
    """

    async def compute(lines: Sequence[BatchLine | RefusedLine]) -> list[FinishedLine]:
        ids = [request_id_of(digest, line.number) for line in lines]
        requests = [
            LineRequest(line.url, line.body, request_id, created)
            for line, request_id in zip(lines, ids, strict=True)
            if isinstance(line, BatchLine)
        ]
        responses = iter(await _respond_once_available(respond_all, requests, submitter) if requests else ())
        return [
            FinishedLine(line.custom_id, request_id, response=next(responses))
            if isinstance(line, BatchLine)
            else FinishedLine(line.custom_id, request_id, error=line.error)
            for line, request_id in zip(lines, ids, strict=True)
        ]

    return compute


async def _respond_once_available(
    respond_all: RespondAll, requests: Sequence[LineRequest], submitter: Submitter
) -> list[LineResponse]:
    deaths = 0
    for pause_s in (*RETRY_S, None):
        try:
            return await respond_all(requests, submitter)
        except UnavailableError as error:
            deaths += isinstance(error, EngineProcessDiedError)
            if deaths == MAX_DEATHS:
                break
            if pause_s is None:
                raise
            await trio.sleep(pause_s)
    if len(requests) == 1:
        return [ENGINE_DIED]
    return [(await _respond_once_available(respond_all, [request], submitter))[0] for request in requests]


def refuse_by(error: LineError, *, digest: str) -> ComputeLines:
    """Return a function that computes nothing, and finishes all lines with an error."""

    async def refuse(lines: Sequence[BatchLine | RefusedLine]) -> list[FinishedLine]:
        await trio.lowlevel.checkpoint()
        return [FinishedLine(line.custom_id, request_id_of(digest, line.number), error=error) for line in lines]

    return refuse
