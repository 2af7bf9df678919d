"""What ``run-batch`` does, from its options to the exit status."""

import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from hashlib import sha256

import msgspec
import trio
from attrs import evolve, field, frozen
from rich.console import Console

from trio_pool_serve.api.dialects import DIALECTS, INVOCATIONS
from trio_pool_serve.api.dialects.openai import OPENAI
from trio_pool_serve.api.http.line_responses import LineResponder
from trio_pool_serve.bulk.batch_options import BatchModelOptions, BatchOptions
from trio_pool_serve.bulk.bulk_options import journal_path
from trio_pool_serve.bulk.command import ROWS_FAILED
from trio_pool_serve.bulk.earlier_output import check_output
from trio_pool_serve.bulk.file_urls import check_path_or_url, download, is_url, upload, without_secrets
from trio_pool_serve.bulk.own_service import identity_of, open_own_service
from trio_pool_serve.bulk.run_progress import RunProgress
from trio_pool_serve.bulk.stop_signals import stop_signals
from trio_pool_serve.bulk.vllm_lines import write_line
from trio_pool_serve.errors import (
    PoolServeError,
    TransferError,
    unwrap_exception_groups,
)
from trio_pool_serve.runs.journal import Identity, Journal, Progress, open_journal
from trio_pool_serve.runs.requests.batch_line import BatchLine, LineError, RefusedLine
from trio_pool_serve.runs.requests.line_request import LineRequest, Submitter
from trio_pool_serve.runs.requests.line_run import ComputeLines, FinishedLine, LineRun, Position, compute_by, run_lines
from trio_pool_serve.runs.tables.input_files import InputFile
from trio_pool_serve.runs.tables.input_table import Fingerprint, InputTable
from trio_pool_serve.runs.tables.output_table import Written, check_finished
from trio_pool_serve.runs.tables.table_formats import Format
from trio_pool_serve.server.launcher import EXAMPLES
from trio_pool_serve.service import Service
from trio_pool_serve.threads.offload import Offload

STOPPED = 128 + signal.SIGINT

JSONL = Format("jsonl")


@frozen
class Checkpoint:
    """What the journal keeps of a run: how far it has come, and the time in the bodies of its responses."""

    created: int
    position: Position = field(factory=Position)


async def run_batch(options: BatchOptions, own: BatchModelOptions) -> int:
    """Run a file of requests; return the exit status: 0, 1 for errors, 3 if lines failed, 130 if stopped.

    Cancellation: at once; what was committed stays.
    """
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        with unwrap_exception_groups(PoolServeError, OSError):
            return await _run(console, options, own)
    except (PoolServeError, OSError) as error:
        console.print(f"trio-pool-serve: {error}", style="red", markup=False)
        return 1


async def _run(console: Console, options: BatchOptions, own: BatchModelOptions) -> int:
    offload = Offload()
    await offload.run("files", partial(_check_files, options))
    async with AsyncExitStack() as stack:
        stop = await stack.enter_async_context(stop_signals())
        source = await _open_input(options, offload)
        fingerprint = await offload.run("files", partial(source.scan, lambda _: None))
        service = await stack.enter_async_context(open_own_service(options.model, own))
        batch = OwnBatch(console, options, source, fingerprint, service)
        identity = Identity(
            input=fingerprint,
            arguments={"the command": "run-batch", "--served-model-name": own.served_model_name},
            model=await identity_of(service, options.model, await batch.digest_of_sample()),
        )
        journal = await stack.enter_async_context(open_journal(journal_path(options.output), identity))
        return await batch.run(journal, stop)


def _check_files(options: BatchOptions) -> None:
    """Refuse files that cannot be the input or the output; remove what is to be overwritten. Blocking."""
    check_path_or_url(options.input_file)
    check_path_or_url(options.output_file)
    inputs, copies = ((), (options.input,)) if is_url(options.input_file) else ((options.input,), ())
    check_output(options.output, inputs=inputs, overwrite=options.overwrite, beside=copies)


async def _open_input(options: BatchOptions, offload: Offload) -> InputTable:
    path, name = options.input, options.input.name
    if is_url(options.input_file):
        name = without_secrets(options.input_file)
        if not await offload.run("files", path.exists):
            await download(options.input_file, path, offload)
    return InputTable(JSONL, (InputFile(name, path),))


@frozen(eq=False)
class OwnBatch:
    """Computes the lines of an input by the routes of the server, in this process."""

    console: Console
    options: BatchOptions
    input: InputTable
    fingerprint: Fingerprint
    """Of the input."""
    service: Service
    responder: LineResponder = field(init=False)

    @responder.default
    def _of_all_routes(self) -> LineResponder:
        # Nothing else waits for these batches, so they have all of the budget.
        return LineResponder(self.service, DIALECTS, INVOCATIONS, OPENAI, token_divisor=1)

    async def digest_of_sample(self) -> str:
        """Return what is computed from an example: it differs if a library or the CPU computes otherwise.

        Cancellation: at once.
        """
        tasks = self.service.model().folder.spec.tasks
        path, body = EXAMPLES[next(task for task in EXAMPLES if task in tasks)]
        (response,) = await self.responder.respond_all([LineRequest(path, body.encode(), "sample", 0)], Submitter())
        return sha256(response.body).hexdigest()

    async def run(self, journal: Journal, stop: trio.Event) -> int:
        """Compute what is left, or the windows that are begun when ``stop`` is set; return the exit status.

        Raises ``PoolServeError``. Cancellation: at once; what was committed stays.
        """
        if not journal.progress.is_finished:
            with RunProgress("run-batch", self.fingerprint.rows, journal.progress, self.console) as progress:
                has_ended = await self._compute(journal, progress, stop)
            self.console.print(f"run-batch: {progress.counts(journal.progress)}", markup=False)
            if not has_ended:
                self.console.print("Stopped. The same command goes on where this run has ended.", markup=False)
                return STOPPED
            await self._finish(journal)
        else:
            await self._check_finished(journal)
        return ROWS_FAILED if journal.progress.failed else 0

    async def _compute(self, journal: Journal, progress: RunProgress, stop: trio.Event) -> bool:
        (file,) = self.fingerprint.files
        checkpoint = _checkpoint_in(journal.progress) or Checkpoint(created=file.mtime_ns // 10**9)

        async def commit(position: Position) -> None:
            await self.service.offload.run("files", self.input.check_unchanged)
            await journal.commit(_progress_at(evolve(checkpoint, position=position)))

        compute = compute_by(self.responder.respond_all, Submitter(), digest=file.blake2b, created=checkpoint.created)
        run = LineRun(
            input=self.options.input,
            output=self.options.output,
            compute=partial(self._compute_known, compute),
            write=write_line,
            commit=commit,
            offload=self.service.offload,
            max_line_bytes=self.service.config.network.max_body_bytes,
            on_progress=lambda _: progress.show(journal.progress),
            should_pause=stop.is_set,
        )
        return await run_lines(run, checkpoint.position)

    async def _compute_known(
        self, compute: ComputeLines, lines: Sequence[BatchLine | RefusedLine]
    ) -> list[FinishedLine]:
        """Compute lines, but those for routes that there are not: these fail as they do in vLLM."""
        return await compute([self._known(line) for line in lines])

    def _known(self, line: BatchLine | RefusedLine) -> BatchLine | RefusedLine:
        if isinstance(line, RefusedLine) or self.responder.has_route(line.url):
            return line
        supported = ", ".join(sorted(self.responder.paths))
        error = LineError("unknown_url", f"URL {line.url} was used. Supported endpoints: {supported}.", "url")
        return RefusedLine(line.number, line.custom_id, error)

    async def _finish(self, journal: Journal) -> None:
        """Put the output to its URL if it has one, and commit that all is done."""
        output, target = self.options.output, self.options.output_file
        if is_url(target):
            try:
                await upload(output, target, self.service.offload)
            except TransferError as error:
                raise TransferError(f"{error} The output is in {output}. The same command puts it again.") from error
        await journal.commit(evolve(journal.progress, is_finished=True))
        await self.service.offload.run("files", self._remove_temporary)

    def _remove_temporary(self) -> None:
        """Remove the copies of what is, or was, at URLs. Blocking."""
        if is_url(self.options.output_file):
            self.options.output.unlink(missing_ok=True)
        if is_url(self.options.input_file):
            self.options.input.unlink(missing_ok=True)

    async def _check_finished(self, journal: Journal) -> None:
        output, target = self.options.output, self.options.output_file
        checkpoint = _checkpoint_in(journal.progress)
        written = Written(0 if checkpoint is None else checkpoint.position.output_bytes)
        if not is_url(target):
            await self.service.offload.run("files", partial(check_finished, output, JSONL, written))
        await self.service.offload.run("files", self._remove_temporary)
        shown = without_secrets(target) if is_url(target) else target
        self.console.print(f"{shown} is complete: {journal.progress.done:,} lines.", markup=False)


def _checkpoint_in(progress: Progress) -> Checkpoint | None:
    return None if progress.output is None else msgspec.json.decode(progress.output, type=Checkpoint)


def _progress_at(checkpoint: Checkpoint) -> Progress:
    position = checkpoint.position
    return Progress(
        next_row=position.line,
        done=position.completed + position.failed,
        failed=position.failed,
        tokens=position.tokens,
        output=msgspec.json.encode(checkpoint),
    )
