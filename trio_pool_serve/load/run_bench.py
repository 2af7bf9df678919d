"""Runs a load against servers in turns, and shows the results."""

import json
import os
import random
import signal
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import trio
from attrs import evolve
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from trio_pool_serve.bulk.file_urls import without_secrets
from trio_pool_serve.errors import PoolServeError, innermost, require
from trio_pool_serve.load.bench_options import CLIENTS, LoadOptions, RequestOptions
from trio_pool_serve.load.bench_result import Round, ServerResult, as_document, print_results
from trio_pool_serve.load.client_connection import ClientConnection, NoResponseError, Response, Target, request_bytes
from trio_pool_serve.load.load_run import LoadPlan, LoadRun, quantile
from trio_pool_serve.processes.signals import stop_signals
from trio_pool_serve.threads.offload import Offload

SOME_FAILED = 3
"""Exit status if some requests failed."""

ROUNDS_OF_SEVERAL = 3

WARMUP_S = 1.0
"""Seconds of load before measuring begins, in which connections are opened and caches filled."""

TIMEOUT_S = 60.0
"""After this time a request without a response counts as failed: most clients give up no later."""

SHOW_EVERY_S = 0.25

DISCOVERY_TIMEOUT_S = 10.0

DEFAULT_PORTS = {"http": 80, "https": 443}

COMMON_WORDS = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not
what all were we when your can said there use an each which she do how their if will up other about out many then them
these so some her would make like him into time has look two more write go see number no way could people my than
first water been call who oil its now find long down day did get come made may part over new sound take only little
work know place year live me back give most very after thing our just name good sentence man think say great where
help through much before line right too mean old any same tell boy follow came want show
"""
"""The most common English words, each of which is one token to most tokenizers."""

SPECIAL_TOKENS = 2
"""Tokens that most models add to a text."""

BODIES = 512
"""Number of different bodies of random texts: servers may cache the results of texts that they have seen."""

MAX_FILE_BYTES = 256 * 2**20


class BenchError(PoolServeError):
    """The requests cannot be made; the message is for the user at the terminal."""


def _input(texts: Sequence[str]) -> dict[str, Any]:
    return {"input": texts[0] if len(texts) == 1 else list(texts)}


ROUTES: Mapping[str, Callable[[Sequence[str]], dict[str, Any]]] = {
    "/embeddings": _input,
    "/pooling": _input,
    "/classify": _input,
    "/rerank": lambda texts: {"query": texts[0], "documents": list(texts[1:])},
    "/score": lambda texts: {"text_1": texts[0], "text_2": list(texts[1:])},
    "/embed": lambda texts: {"inputs": list(texts)},
}
"""Functions from texts to the fields of a body, by the last part of a route's path."""

WITH_QUERY = frozenset({"/rerank", "/score"})


async def run_bench(urls: Sequence[str], load: LoadOptions, requests: RequestOptions, file: Path | None) -> int:
    """Send the load to each server in turns, print the results and write them to a file; return the exit status.

    Cancellation: at once; nothing is printed.
    """
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        check_folder(file)
        measured, stopped = await measure(urls, load, requests, console)
        print_results(measured, Console(highlight=False))
        if file is not None:
            document = msgspec.json.encode(as_document(measured, load, requests), enc_hook=str)
            await Offload().run("files", partial(file.write_bytes, msgspec.json.format(document, indent=1) + b"\n"))
    except (BenchError, OSError) as error:
        console.print(f"trio-pool-serve: {error}", style="red", markup=False)
        return 1
    if stopped:
        console.print("Stopped: these are the results so far.", markup=False)
        return 128 + signal.SIGINT
    if not all(result.latencies_ms for result in measured):
        return 1
    return SOME_FAILED if any(result.failed for result in measured) else 0


def check_folder(file: Path | None) -> None:
    """Raise ``BenchError`` if a file cannot be written, before anything is measured. Blocks."""
    require(
        file is None or file.absolute().parent.is_dir(),
        f"{file} cannot be written: its folder does not exist.",
        BenchError,
    )


async def measure(
    urls: Sequence[str], load: LoadOptions, requests: RequestOptions, console: Console
) -> tuple[list[ServerResult], bool]:
    """Return the results of each server, and whether a signal ended the measurement early.

    Raises ``BenchError``. Cancellation: at once.
    """
    requests = evolve(requests, api_key=requests.api_key or os.environ.get("OPENAI_API_KEY"))
    targets = [target_of(url, requests.route) for url in urls]
    plans = [await _plan_for(target, load, requests) for target in targets]
    rounds: list[list[Round]] = [[] for _ in urls]
    async with stop_signals() as stop:
        for number, (index, plan) in product(range(1 if len(urls) == 1 else ROUNDS_OF_SEVERAL), enumerate(plans)):
            with _showing(console, f"{urls[index]}, round {number + 1}", load) as show:
                measured = await run_round(plan, stop, show)
            if measured is not None:
                rounds[index].append(measured)
            if stop.is_set():
                break
    return [
        ServerResult(url=url, rounds=of_server, texts_per_request=requests.texts)
        for url, of_server in zip(urls, rounds, strict=True)
        if of_server
    ], stop.is_set()


def target_of(url: str, route: str) -> Target:
    """Return the target of a route of a server; the URL and the route may both contain ``/v1``.

    Raises ``BenchError``.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BenchError(f"{url!r} is not a URL: {error}.") from error
    if parts.scheme not in DEFAULT_PORTS or not host or parts.query or parts.username is not None:
        raise BenchError(f"{without_secrets(url)!r} is not the URL of a server; write it as http://127.0.0.1:8000.")
    path = parts.path.rstrip("/")
    if path.endswith("/v1") and route.startswith("/v1/"):
        path = path.removesuffix("/v1")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    return Target(host=host, port=port or DEFAULT_PORTS[parts.scheme], tls=tls, path=path)


async def _plan_for(target: Target, load: LoadOptions, requests: RequestOptions) -> LoadPlan:
    model = requests.model
    if model is None and requests.body_file is None and requests.route != "/embed":
        model = await first_model(target, requests.api_key)
    bodies = await Offload().run("files", partial(bodies_of, requests, model))
    path, headers = target.path + requests.route, _headers(requests.api_key)
    return LoadPlan(
        target=target,
        requests=[request_bytes(path, body, host=target.authority, headers=headers) for body in bodies],
        clients=0 if load.rate is not None else load.clients or CLIENTS,
        per_s=load.rate or 0.0,
        poisson=True,
        ramp_s=WARMUP_S,
        seconds=load.duration,
        timeout_s=TIMEOUT_S,
    )


def _headers(api_key: str | None) -> str:
    return "" if not api_key else f"Authorization: Bearer {api_key}\r\n"


async def first_model(target: Target, api_key: str | None) -> str:
    """Return the first model that a server lists. Raises ``BenchError``. Cancellation: at once."""
    path = f"{target.path}/models" if target.path.endswith("/v1") else f"{target.path}/v1/models"
    request = request_bytes(path, host=target.authority, headers=_headers(api_key))
    try:
        with trio.fail_after(DISCOVERY_TIMEOUT_S):
            async with await ClientConnection.open(target, keeps_body=True) as connection:
                response = await connection.ask(request)
    except (OSError, trio.BrokenResourceError, NoResponseError, trio.TooSlowError) as error:
        reason = innermost(error.__cause__ or error)
        raise BenchError(f"{target.authority} does not respond: {str(reason) or repr(reason)}") from error
    with suppress(msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        if response.status == 200:
            return str(msgspec.json.decode(response.body)["data"][0]["id"])
    raise BenchError(f"{path} of {target.authority} lists no model (status {response.status}). Name one with --model.")


def bodies_of(options: RequestOptions, model: str | None) -> list[bytes]:
    """Return the bodies of the requests, which are sent in turns. Blocks. Raises ``BenchError``."""
    if options.body_file is not None:
        return [line.encode() for line in _lines_of(options.body_file)]
    kind = "/" + options.route.rpartition("/")[2]
    require(
        kind in ROUTES, f"--route {options.route} requires --body-file. Without it: {', '.join(ROUTES)}.", BenchError
    )
    named = {} if model is None else {"model": model}
    size = options.texts + (kind in WITH_QUERY)
    texts = _texts(options, size)
    return [
        json.dumps({**named, **ROUTES[kind](texts[begin : begin + size])}).encode()
        for begin in range(0, len(texts), size)
    ]


def _texts(options: RequestOptions, size: int) -> list[str]:
    """Return random texts for whole requests of ``size`` texts, the same in each run."""
    choose = random.Random(0)  # noqa: S311  (for texts)
    words = max(1, options.tokens - SPECIAL_TOKENS)
    bodies = max(1, min(BODIES, MAX_FILE_BYTES // (8 * words * size)))
    return [" ".join(choose.choices(COMMON_WORDS.split(), k=words)) for _ in range(bodies * size)]


def _lines_of(path: Path) -> list[str]:
    try:
        require(path.stat().st_size <= MAX_FILE_BYTES, f"{path} exceeds {MAX_FILE_BYTES // 2**20} MiB.", BenchError)
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path} cannot be read: {error}") from error
    require(bool(lines), f"{path} contains no lines.", BenchError)
    return lines


def total_tokens_of(response: Response) -> int | None:
    """Return the number of tokens in a response's usage; ``None`` if there is none."""
    try:
        tokens = msgspec.json.decode(response.body)["usage"]["total_tokens"]
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        return None
    return tokens if isinstance(tokens, int) and tokens > 0 else None


async def run_round(plan: LoadPlan, stop: trio.Event, show: Callable[[LoadRun], object]) -> Round | None:
    """Run a load until its end or until ``stop``; ``None`` if nothing has been counted by then.

    Cancellation: at once.
    """
    tokens: list[int | None] = []
    run = LoadRun(plan, on_response=lambda response: tokens.append(total_tokens_of(response)))
    async with trio.open_nursery() as nursery:

        async def show_until_stopped() -> None:
            while not stop.is_set():
                with trio.move_on_after(SHOW_EVERY_S):
                    await stop.wait()
                show(run)
            nursery.cancel_scope.cancel(reason="a signal")

        nursery.start_soon(show_until_stopped)
        await run.run()
        nursery.cancel_scope.cancel(reason="all requests have ended")
    seconds = run.measured_s
    if not run.outcomes or not seconds:
        return None
    return Round(
        seconds=seconds,
        requests_per_s=run.finished / seconds,
        latencies_ms=sorted(1e3 * latency for latency in run.latencies),
        outcomes={name: len(latencies) for name, latencies in run.outcomes.items()},
        reasons=run.reasons,
        late_p99_ms=1e3 * quantile(run.late_s, 0.99) if run.late_s else 0.0,
        tokens=sum(filter(None, tokens)) if tokens and None not in tokens else None,
        unfinished=run.unfinished,
    )


@contextmanager
def _showing(console: Console, title: str, load: LoadOptions) -> Iterator[Callable[[LoadRun], object]]:
    """Show a progress bar and the counts of responses so far, on a terminal."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[counts]}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(title, total=load.duration, counts="")

        def show(run: LoadRun) -> None:
            failed = sum(map(len, run.outcomes.values())) - len(run.latencies)
            counts = f"{len(run.latencies)} answered, {failed} failed, {run.in_flight} in flight"
            progress.update(bar, completed=run.measured_s, counts=counts)

        yield show
