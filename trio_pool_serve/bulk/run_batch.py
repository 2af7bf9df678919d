"""What ``run-batch`` does, from its options to the exit status."""

from contextlib import AsyncExitStack
from functools import partial
from hashlib import sha256

import trio
from attrs import Factory, field, frozen
from rich.console import Console

from trio_pool_serve.api.dialects import DIALECTS, INVOCATIONS
from trio_pool_serve.api.dialects.openai import OPENAI
from trio_pool_serve.api.http.line_responder import LineResponder
from trio_pool_serve.api.http.route_table import RouteTable
from trio_pool_serve.api.http.task_handler import task_routes
from trio_pool_serve.bulk.bulk_options import BatchModelOptions, BatchOptions, journal_path
from trio_pool_serve.bulk.earlier_output import check_output
from trio_pool_serve.bulk.file_urls import check_path_or_url, download, is_url, upload, without_secrets
from trio_pool_serve.bulk.own_engine import identity_of, open_own_service
from trio_pool_serve.bulk.run_table import exit_status, run_shown
from trio_pool_serve.errors import TransferError
from trio_pool_serve.processes.signals import stop_signals
from trio_pool_serve.runs.journal import Identity, Journal, open_journal
from trio_pool_serve.runs.requests.line_results import (
    FinishedLine,
    LineComputer,
    LineFiles,
    LineRequest,
    Submitter,
    encode_result,
)
from trio_pool_serve.runs.requests.request_lines import BatchError, Line, line_windows
from trio_pool_serve.runs.run import Position
from trio_pool_serve.runs.tables.input_files import InputFile
from trio_pool_serve.runs.tables.input_table import InputTable
from trio_pool_serve.runs.tables.output_table import check_finished
from trio_pool_serve.runs.tables.table_formats import Format
from trio_pool_serve.server.announcement import EXAMPLES
from trio_pool_serve.service import Service
from trio_pool_serve.threads.offload import Offload

JSONL = Format("jsonl")


async def run_batch(options: BatchOptions, own: BatchModelOptions) -> int:
    """Run a file of requests; return the exit status: 0, 1 for errors, 3 if lines failed, 130 if stopped.

    Cancellation: at once; what was committed stays.
    """
    return await exit_status(lambda console: _run(console, options, own))


async def _run(console: Console, options: BatchOptions, own: BatchModelOptions) -> Position:
    offload = Offload()
    await offload.run("files", partial(_check_files, options))
    async with AsyncExitStack() as stack:
        stop = await stack.enter_async_context(stop_signals())
        source = await _open_input(options, offload)
        fingerprint = await offload.run("files", partial(source.scan, lambda _: None))
        service = await stack.enter_async_context(open_own_service(options.model, own))
        batch = OwnBatch(console, options, source, service)
        identity = Identity(
            input=fingerprint,
            arguments={"the command": "run-batch", "--served-model-name": own.served_model_name},
            model=await identity_of(service, options.model, await batch.digest_of_sample()),
        )
        journal = await stack.enter_async_context(open_journal(journal_path(options.output), identity))
        if journal.position.is_finished:
            await batch.check_finished(journal.position)
            return journal.position
        position = await batch.compute(journal, stop)
        if position.is_finished:
            await batch.finish(journal, position)
        return position


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
    return InputTable((InputFile(name, path),), JSONL)


@frozen(eq=False)
class OwnBatch:
    """Computes the lines of an input by the routes of the server, in this process."""

    console: Console
    options: BatchOptions
    input: InputTable
    service: Service
    responder: LineResponder = field(
        init=False,
        # Nothing else waits for these batches, so they have all of the budget.
        default=Factory(
            lambda self: LineResponder(
                self.service, RouteTable(task_routes(self.service, DIALECTS, INVOCATIONS)), OPENAI, token_divisor=1
            ),
            takes_self=True,
        ),
    )

    async def digest_of_sample(self) -> str:
        """Return a digest of the response to an example: it differs if a library or the CPU computes differently.

        Cancellation: at once.
        """
        tasks = self.service.model().folder.spec.tasks
        path, body = EXAMPLES[next(task for task in EXAMPLES if task in tasks)]
        (response,) = await self.responder.respond_all([LineRequest(path, body.encode(), "sample", 0)], Submitter())
        return sha256(response.body).hexdigest()

    async def compute(self, journal: Journal, stop: trio.Event) -> Position:
        """Compute what is left, or the windows that are begun when ``stop`` is set; return the last position.

        Raises and is cancelled as ``Run.run``.
        """
        (file,) = journal.identity.input.files

        async def commit(position: Position) -> None:
            await self.service.offload.run("files", self.input.check_unchanged)
            await journal.commit(position)

        return await run_shown(
            "run-batch",
            journal.identity.input.rows,
            journal,
            stop,
            self.console,
            windows=partial(line_windows, self.options.input, self.service.config.network.max_body_bytes),
            computer=LineComputer(
                respond_all=self.responder.respond_all,
                submitter=Submitter(),
                digest=file.blake2b,
                created=file.mtime_ns // 10**9,
                error_of=self._error_of,
            ),
            open_sink=partial(LineFiles.open, vllm_result, self.options.output, None),
            commit=commit,
            offload=self.service.offload,
        )

    def _error_of(self, line: Line) -> BatchError | None:
        """Return the error of a line whose route does not exist, as vLLM writes it."""
        if self.responder.has_route(line.url):
            return None
        supported = ", ".join(sorted(self.responder.paths))
        return BatchError("unknown_url", f"URL {line.url} was used. Supported endpoints: {supported}.", "url")

    async def finish(self, journal: Journal, position: Position) -> None:
        """Upload the output if it has a URL, and commit that everything is done.

        Raises ``TransferError`` and ``StorageError``. Cancellation: at once; the same command uploads it again.
        """
        output, target = self.options.output, self.options.output_file
        if is_url(target):
            try:
                await upload(output, target, self.service.offload)
            except TransferError as error:
                raise TransferError(
                    f"{error} The output is in {output}. To upload it again, run the same command."
                ) from error
        await journal.commit(position)
        await self.service.offload.run("files", self._remove_temporary)

    def _remove_temporary(self) -> None:
        """Remove the local copies of an input and an output with a URL. Blocking."""
        if is_url(self.options.output_file):
            self.options.output.unlink(missing_ok=True)
        if is_url(self.options.input_file):
            self.options.input.unlink(missing_ok=True)

    async def check_finished(self, position: Position) -> None:
        """Check that the output of a finished run is still there. Raises ``StorageError``. Cancellation: at once."""
        target = self.options.output_file
        if not is_url(target):
            await self.service.offload.run("files", partial(check_finished, self.options.output, JSONL, position))
        await self.service.offload.run("files", self._remove_temporary)
        shown = without_secrets(target) if is_url(target) else target
        self.console.print(f"{shown} is complete: {position.done:,} lines.", markup=False)


def vllm_result(line: FinishedLine) -> bytes:
    """Return the result of a line in the format of vLLM's ``run-batch``, with the line end.

    The ``error`` is a response with an error, as its route writes it, or a sentence if the line is not a request.
    """
    response = line.response
    if response is None or not response.is_json:
        # The second is vLLM's message for all responses that are not JSON.
        error = line.error.message if line.error is not None else "Request must not be sent in stream mode"
        return encode_result(line, 400, None, error)
    body, of_failed = (None, response.body_in_line) if line.has_failed else (response.body_in_line, None)
    return encode_result(line, response.status, body, of_failed)
