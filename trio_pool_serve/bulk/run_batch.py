"""The command ``run-batch``, from its options to the exit status."""

from contextlib import AsyncExitStack
from functools import partial
from hashlib import sha256

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
from trio_pool_serve.bulk.run_table import complete_run, exit_status
from trio_pool_serve.errors import TransferError
from trio_pool_serve.processes.signals import stop_signals
from trio_pool_serve.runs.journal import Identity, Journal, open_journal
from trio_pool_serve.runs.requests.line_results import (
    FinishedLine,
    LineComputer,
    LineRequest,
    Submitter,
    encode_result,
)
from trio_pool_serve.runs.requests.request_lines import BatchError, Line, line_windows
from trio_pool_serve.runs.run import Position
from trio_pool_serve.runs.tables.input_files import InputFile
from trio_pool_serve.runs.tables.input_table import InputTable
from trio_pool_serve.runs.tables.output_table import ResultFiles, check_finished, open_lines
from trio_pool_serve.runs.tables.table_formats import Format
from trio_pool_serve.server.announcement import EXAMPLES
from trio_pool_serve.service import Service
from trio_pool_serve.threads.offload import Offload

JSONL = Format("jsonl")


async def run_batch(options: BatchOptions, own: BatchModelOptions) -> int:
    """Run a file of requests; return the exit status: 0, 1 for errors, 3 if lines failed, 130 if stopped.

    Cancellation: at once; committed lines stay.
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
        routes = RouteTable(task_routes(service, DIALECTS, INVOCATIONS))
        # Nothing else waits for these batches, so they have all of the budget.
        responder = LineResponder(service, routes, OPENAI, token_divisor=1)
        identity = Identity(
            input=fingerprint,
            arguments={"the command": "run-batch", "--served-model-name": own.served_model_name},
            model=await identity_of(service, options.model, await _digest_of_sample(service, responder)),
        )
        journal = await stack.enter_async_context(open_journal(journal_path(options.output), identity))
        (file,) = journal.identity.input.files

        async def commit(position: Position) -> None:
            await offload.run("files", source.check_unchanged)
            await journal.commit(position)

        return await complete_run(
            "run-batch",
            fingerprint.rows,
            journal,
            stop,
            console,
            check=partial(_check_complete, options, offload, console),
            finish=partial(_finish, options, offload, journal),
            windows=partial(line_windows, options.input, service.config.network.max_body_bytes),
            computer=LineComputer(
                respond_all=responder.respond_all,
                submitter=Submitter(),
                digest=file.blake2b,
                created=file.mtime_ns // 10**9,
                error_of=partial(_error_of, responder),
            ),
            open_sink=partial(
                ResultFiles.open,
                partial(open_lines, options.output),
                None,
                lambda _, lines: (list(map(vllm_result, lines)), ()),
            ),
            commit=commit,
            offload=offload,
        )


def _check_files(options: BatchOptions) -> None:
    """Refuse files that cannot be the input or the output; with ``--overwrite``, remove an earlier output. Blocking."""
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


async def _digest_of_sample(service: Service, responder: LineResponder) -> str:
    """Return a digest of the response to an example: it differs if a library or the CPU computes differently.

    Cancellation: at once.
    """
    tasks = service.model().folder.spec.tasks
    path, body = EXAMPLES[next(task for task in EXAMPLES if task in tasks)]
    (response,) = await responder.respond_all([LineRequest(path, body.encode(), "sample", 0)], Submitter())
    return sha256(response.body).hexdigest()


def _error_of(responder: LineResponder, line: Line) -> BatchError | None:
    """Return the error of a line whose route does not exist, as vLLM writes it."""
    if responder.handler_of(line.url) is not None:
        return None
    supported = ", ".join(sorted(responder.paths))
    return BatchError("unknown_url", f"URL {line.url} was used. Supported endpoints: {supported}.", "url")


async def _finish(options: BatchOptions, offload: Offload, journal: Journal, position: Position) -> None:
    """Upload the output if it has a URL, and commit the last position.

    Raises ``TransferError`` and ``StorageError``. Cancellation: at once; the same command uploads it again.
    """
    if is_url(options.output_file):
        try:
            await upload(options.output, options.output_file, offload)
        except TransferError as error:
            raise TransferError(
                f"{error} The output is in {options.output}. To upload it again, run the same command."
            ) from error
    await journal.commit(position)
    await offload.run("files", partial(_remove_temporary, options))


def _remove_temporary(options: BatchOptions) -> None:
    """Remove the local copies of an input and an output with a URL. Blocking."""
    if is_url(options.output_file):
        options.output.unlink(missing_ok=True)
    if is_url(options.input_file):
        options.input.unlink(missing_ok=True)


async def _check_complete(options: BatchOptions, offload: Offload, console: Console, position: Position) -> None:
    """Check that the output of a complete run is still there. Raises ``StorageError``. Cancellation: at once."""
    target = options.output_file
    if not is_url(target):
        await offload.run("files", partial(check_finished, options.output, JSONL, position))
    await offload.run("files", partial(_remove_temporary, options))
    shown = without_secrets(target) if is_url(target) else target
    console.print(f"{shown} is complete: {position.done:,} lines.", markup=False)


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
