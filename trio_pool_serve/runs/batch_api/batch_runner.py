"""Brings batches from their creation to their end."""

import logging
import sqlite3
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import count

import trio
from attrs import define, field, frozen

from trio_pool_serve.access.api_keys import KeyUsage
from trio_pool_serve.errors import (
    ConflictError,
    NotFoundError,
    QuotaExceededError,
    StorageError,
    StorageLostError,
    UnavailableError,
)
from trio_pool_serve.runs.batch_api.batch_store import TRANSACTION_TIMEOUT_S, BatchStore
from trio_pool_serve.runs.batch_api.data_folder import DataFolder
from trio_pool_serve.runs.batch_api.input_check import InputCheck
from trio_pool_serve.runs.batch_api.stored_records import BatchStatus, StoredBatch, StoredFile
from trio_pool_serve.runs.requests.line_results import LineComputer, RespondAll, Submitter, openai_results
from trio_pool_serve.runs.requests.request_lines import WINDOW_BYTES, BatchError, Line, line_windows
from trio_pool_serve.runs.run import Position, run_windows
from trio_pool_serve.runs.tables.output_table import ResultFiles, open_lines
from trio_pool_serve.storage.durable_files import open_appended, storage_errors
from trio_pool_serve.threads.client_turns import ClientTurns
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Client

logger = logging.getLogger(__name__)

RETRY_PAUSE_S = 10.0
"""Pause before a batch is resumed, after a storage error or while no engine is ready."""

TURN_S = 10.0
"""A batch is computed for at least this long before another owner's turn."""

UNLIMITED = KeyUsage()

EXPIRED = BatchError("batch_expired", "This request could not be executed before the completion window expired.")


@frozen(eq=False)
class LineRoutes:
    """The routes for lines: how they respond, their paths, their models, and the limits of owners."""

    respond_all: RespondAll
    paths: Collection[str]
    model_of: Callable[[str | None, frozenset[str] | None], str]
    """Returns the full name of a model for a name in a request, which is ``None`` for the default model. The second
    argument lists the names of the models that may be used, ``None`` for all. Raises ``NotFoundError``."""
    usage_of: Callable[[str], KeyUsage | None]


@frozen
class BatchStatistics:
    """Numbers of batches of all owners: unfinished, waiting for their turn, and being computed (0 or 1).

    ``lines`` counts the lines that this process has computed.
    """

    unfinished: int = 0
    waiting: int = 0
    computing: int = 0
    lines: int = 0


@define(eq=False)
class BatchRunner:
    """Runs the batches of a store: a task for each that has not ended.

    Inputs are checked one at a time. Batches are computed one at a time: an owner's batches in the order of their
    creation, and owners in turn. An owner with limits has no turn while the next window is not allowed yet. After a
    storage error, a batch is resumed until it succeeds; a batch whose files were removed by someone else fails.
    """

    store: BatchStore
    folder: DataFolder
    offload: Offload
    max_line_bytes: int
    routes: Callable[[], LineRoutes]
    """Returns the current routes: a restarted listener has new ones."""
    _nursery: trio.Nursery | None = field(default=None, init=False)
    _scopes: dict[str, trio.CancelScope] = field(init=False, factory=dict)
    """For each batch that has not ended, the scope of its present or next step. It is cancelled with the batch, and
    when the batch expires, by trio's clock, which never jumps."""
    _lines: int = field(default=0, init=False)
    _checking: trio.Lock = field(init=False, factory=trio.Lock)
    _turns: ClientTurns = field(init=False, factory=partial(ClientTurns, 1, 1))
    _numbers: "count[int]" = field(init=False, factory=count)
    _saved_up: dict[str, int] = field(init=False, factory=dict)
    """For each batch, the first line of the window for which its owner has saved up: it counts once, however often the
    window is tried."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run all unfinished batches, and the ones that ``start`` adds. Raises ``StorageError`` before it has started.

        Cancellation: as soon as running threads have finished; each batch resumes after its last commit.
        """
        batches = await self.store.unfinished()
        async with trio.open_nursery() as self._nursery:
            for batch in batches:
                self.start(batch)
            task_status.started()
            await trio.sleep_forever()

    def start(self, batch: StoredBatch) -> None:
        """Run a batch."""
        if self._nursery is not None:
            left_s, window_s = batch.expires_at - self.store.clock(), batch.expires_at - batch.times["created_at"]
            if not 0 < left_s <= window_s:  # no server was running, or the clock is or was wrong
                left_s = window_s
            self._scopes[batch.id] = trio.CancelScope(deadline=trio.current_time() + left_s)
            self._nursery.start_soon(self._run_to_its_end, batch.id, next(self._numbers))

    def statistics(self) -> BatchStatistics:
        """Return the numbers of this moment."""
        return BatchStatistics(len(self._scopes), self._turns.waiting, self._turns.working, self._lines)

    async def cancel(self, owner: str, batch_id: str) -> StoredBatch:
        """Stop a batch; its results are the committed ones.

        Raises as ``BatchStore.cancel``. Cancellation: it is stopped all the same.
        """
        # Not cancelled: a batch in the state `cancelling` must not be computed further.
        with trio.fail_after(TRANSACTION_TIMEOUT_S, shield=True):
            batch = await self.store.cancel(owner, batch_id)
        if batch_id in self._scopes:
            self._scopes[batch_id].cancel(reason="the batch has been cancelled")
        return batch

    async def _run_to_its_end(self, batch_id: str, number: int) -> None:
        while True:
            try:
                batch = await self.store.batch(None, batch_id)
                match batch.status:
                    case "validating":
                        await self._check(batch)
                    case "in_progress":
                        await self._compute(batch, number)
                    case "finalizing":
                        await self._finalize(batch)
                    case "cancelling":
                        await self._end(batch, "cancelled")
                    case _:
                        break
            except NotFoundError:
                break
            except ConflictError:
                continue  # the batch has been cancelled meanwhile: its state has another next step
            except StorageLostError as error:
                logger.error("the batch %s fails: %s", batch_id, error)  # noqa: TRY400  (the message is enough)
                await self._fail(batch_id, BatchError("file_lost", "A file of the batch was removed."))
            except (StorageError, UnavailableError, sqlite3.Error) as error:
                logger.warning("the batch %s waits: %s", batch_id, error)
                await trio.sleep(RETRY_PAUSE_S)
            except QuotaExceededError as error:
                await self._fail(batch_id, BatchError("quota_exceeded", str(error)))
            except Exception:
                logger.exception("the batch %s fails", batch_id)
                await self._fail(batch_id, BatchError("internal_error", "Internal error."))
        del self._scopes[batch_id]
        self._saved_up.pop(batch_id, None)

    async def _check(self, batch: StoredBatch) -> None:
        check = InputCheck(batch.endpoint, lambda name: self.routes().model_of(name, batch.models))
        lines = line_windows(self.folder.file(batch.input_file_id), self.max_line_bytes, Position())
        with self._working_on(batch) as scope, closing(lines):
            async with self._checking:
                has_ended = False
                while not has_ended:
                    has_ended = await self.offload.run("files", partial(check.check_some, lines))
        if scope.cancelled_caught:
            if trio.current_time() >= scope.deadline:
                await self.store.advance(batch.id, "expired", is_expired=True)
        elif check.errors:
            await self.store.advance(batch.id, "failed", errors=tuple(check.errors))
        else:
            await self.store.advance(batch.id, "in_progress", total=check.total, model=check.model)

    async def _compute(self, batch: StoredBatch, number: int) -> None:
        position, client = batch.position, Client(batch.owner, is_background=True)
        with self._working_on(batch) as scope:
            usage = self.routes().usage_of(batch.owner)
            is_free = usage is None or self._saved_up.get(batch.id) == position.line
            cost = (0, 0) if is_free else await self.offload.run("files", partial(self._cost_of_next, batch))
            # Outside of the turn: other owners' batches are computed while an owner with limits waits.
            async with (usage or UNLIMITED).saved_up(*cost), self._turns.turn(client.number, number):
                self._saved_up[batch.id] = position.line
                ends, windows = trio.current_time() + TURN_S, count()

                def should_pause() -> bool:
                    # A turn has at least one window, or short turns would not make progress. With limits, it has no
                    # more: the owner has saved up for one.
                    is_over = next(windows) > 0 and (usage is not None or trio.current_time() >= ends)
                    return is_over and (usage is not None or self._turns.step_back(client.number))

                try:
                    submitter = Submitter(client, batch.models, usage)
                    position = await self._run_lines(batch, submitter, should_pause=should_pause)
                finally:
                    # The owner went to the end of the line when the turn began. Owners that have come since are next.
                    self._turns.step_back(client.number)
        if position.is_finished:
            await self.store.advance(batch.id, "finalizing")
        elif scope.cancelled_caught and trio.current_time() >= scope.deadline:
            await self.store.advance(batch.id, "finalizing", is_expired=True)

    def _cost_of_next(self, batch: StoredBatch) -> tuple[int, int]:
        """Return the requests of a batch's next window, and how many tokens it may have. Blocks."""
        done = batch.position
        with closing(line_windows(self.folder.file(batch.input_file_id), self.max_line_bytes, done)) as windows:
            window = next(windows, None)
        if window is None:
            return 0, 0
        nbytes = window.next_offset - done.offset
        # Before the first tokens, an estimate for English text.
        tokens = nbytes * done.tokens // done.offset if done.tokens else min(nbytes, WINDOW_BYTES) // 4
        return len(window.rows), tokens

    async def _run_lines(
        self,
        batch: StoredBatch,
        submitter: Submitter,
        *,
        error_of: Callable[[Line], BatchError | None] = lambda _: None,
        should_pause: Callable[[], bool] = lambda: False,
    ) -> Position:
        file, done = self.folder.file, batch.position.done

        def count_lines(position: Position) -> None:
            nonlocal done
            self._lines += position.done - done
            done = position.done

        return await run_windows(
            batch.position,
            windows=partial(line_windows, file(batch.input_file_id), self.max_line_bytes),
            computer=LineComputer(
                respond_all=self.routes().respond_all,
                submitter=submitter,
                digest=batch.digest,
                created=batch.input_created_at,
                error_of=error_of,
            ),
            open_sink=partial(
                ResultFiles.open, partial(open_lines, file(batch.output_id)), file(batch.error_id), openai_results
            ),
            commit=partial(self.store.commit, batch.id),
            offload=self.offload,
            should_pause=should_pause,
            on_progress=count_lines,
        )

    async def _finalize(self, batch: StoredBatch) -> None:
        if batch.is_expired:
            await self._run_lines(batch, Submitter(), error_of=lambda _: EXPIRED)
            batch = await self.store.batch(None, batch.id)
        await self._end(batch, "expired" if batch.is_expired else "completed")

    async def _end(self, batch: StoredBatch, status: BatchStatus, errors: tuple[BatchError, ...] = ()) -> None:
        """Make files of the results that have been committed, and bring the batch into its last state."""
        results: dict[str, StoredFile] = {}
        for kind, file_id, length in (
            ("output", batch.output_id, batch.position.output_bytes),
            ("error", batch.error_id, batch.position.error_bytes),
        ):
            if await self.offload.run("files", partial(self._cut, file_id, length)):
                now = int(self.store.clock())
                results[f"{kind}_file_id"] = StoredFile(
                    id=file_id,
                    owner=batch.owner,
                    purpose="batch_output",
                    filename=f"{batch.id}_{kind}.jsonl",
                    bytes=length,
                    created_at=now,
                    expires_at=None if batch.results_expire_s is None else now + batch.results_expire_s,
                )
        ids = {name: file.id for name, file in results.items()}
        await self.store.advance(batch.id, status, [*results.values()], errors=errors, **ids)

    def _cut(self, file_id: str, length: int) -> bool:
        """Cut a result off at its committed length; remove an empty one. Runs in a thread."""
        path = self.folder.file(file_id)
        if length:
            with closing(open_appended(path, length)) as file:
                file.sync()
            return True
        with storage_errors(path):
            path.unlink(missing_ok=True)
        return False

    async def _fail(self, batch_id: str, error: BatchError) -> None:
        """Bring a batch into the state ``failed``, with the results it has."""
        try:
            batch = await self.store.batch(None, batch_id)
            try:
                await self._end(batch, "failed", (error,))
            except StorageLostError:
                await self.store.advance(batch_id, "failed", errors=(error,))
        except Exception as failure:  # the batch is resumed, and fails again
            logger.warning("the batch %s waits: %s", batch_id, failure)
            await trio.sleep(RETRY_PAUSE_S)

    @contextmanager
    def _working_on(self, batch: StoredBatch) -> Iterator[trio.CancelScope]:
        """Cancel the block when the batch expires, which is the deadline of the scope, or is cancelled."""
        try:
            with self._scopes[batch.id] as scope:
                yield scope
        finally:
            self._scopes[batch.id] = trio.CancelScope(deadline=scope.deadline)
