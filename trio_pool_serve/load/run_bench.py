"""Runs a load against servers in turns, and shows the results."""

import os
import signal
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import trio
from attrs import define, evolve
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from trio_pool_serve.bulk.file_urls import without_secrets
from trio_pool_serve.bulk.stop_signals import stop_signals
from trio_pool_serve.load.bench_command import CLIENTS, LoadOptions, RequestOptions
from trio_pool_serve.load.bench_result import Round, ServerResult, as_document, print_results
from trio_pool_serve.load.client_connection import (
    ClientConnection,
    ConnectionEndedError,
    NotHttpError,
    Response,
    Target,
    request_bytes,
)
from trio_pool_serve.load.load_run import LoadPlan, LoadRun
from trio_pool_serve.load.outcomes import quantile
from trio_pool_serve.load.request_bodies import BenchError, bodies_of
from trio_pool_serve.threads.offload import Offload

SOME_FAILED = 3
"""Exit status when some requests have failed."""

ROUNDS_OF_SEVERAL = 3

WARMUP_S = 1.0
"""For which requests are sent before those that are measured: connections are opened, and caches filled."""

TIMEOUT_S = 60.0
"""After which a request without a response counts as failed: most clients give up no later."""

SHOW_EVERY_S = 0.25

DISCOVERY_TIMEOUT_S = 10.0

DEFAULT_PORTS = {"http": 80, "https": 443}


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
    if file is not None and not file.absolute().parent.is_dir():
        raise BenchError(f"{file} cannot be written: there is no such folder.")


async def measure(
    urls: Sequence[str], load: LoadOptions, requests: RequestOptions, console: Console
) -> tuple[list[ServerResult], bool]:
    """Return what was measured of each server, and whether a signal has ended it early.

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
    found = [
        ServerResult(url=url, rounds=of_server, texts_per_request=requests.texts)
        for url, of_server in zip(urls, rounds, strict=True)
        if of_server
    ]
    return found, stop.is_set()


def target_of(url: str, route: str) -> Target:
    """Return where the requests to a server go; both the URL and the route may have ``/v1``. Raises ``BenchError``."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BenchError(f"{url!r} is not a URL: {error}.") from error
    if parts.scheme not in DEFAULT_PORTS or not host or parts.query or parts.username is not None:
        raise BenchError(f"{without_secrets(url)!r} is not the URL of a server, such as http://127.0.0.1:8000.")
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
    except (OSError, trio.BrokenResourceError, ConnectionEndedError, NotHttpError, trio.TooSlowError) as error:
        raise BenchError(f"{target.authority} does not answer: {error.__cause__ or error!r}") from error
    if response.status == 200:
        try:
            return str(msgspec.json.decode(response.body)["data"][0]["id"])
        except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
            pass
    raise BenchError(f"{path} of {target.authority} lists no model (status {response.status}): --model is needed.")


class WithUsage(msgspec.Struct):
    """A response, all but its usage left out."""

    usage: dict[str, Any] | None = None


@define(eq=False)
class TokenCount:
    """Adds up the tokens that responses count."""

    total: int | None = 0
    """``None`` once a response has not counted them."""

    def add(self, response: Response) -> None:
        """Take note of a response."""
        if self.total is None:
            return
        try:
            tokens = (msgspec.json.decode(response.body, type=WithUsage).usage or {}).get("total_tokens")
        except (msgspec.DecodeError, UnicodeDecodeError):
            tokens = None
        self.total = self.total + tokens if isinstance(tokens, int) and tokens > 0 else None


async def run_round(plan: LoadPlan, stop: trio.Event, show: Callable[[LoadRun], object]) -> Round | None:
    """Run a load until its end or until ``stop``; ``None`` if nothing has been counted by then.

    Cancellation: at once.
    """
    tokens = TokenCount()
    run = LoadRun(plan, keeps_body=True, on_response=tokens.add)
    async with trio.open_nursery() as nursery:

        async def stop_early() -> None:
            await stop.wait()
            nursery.cancel_scope.cancel(reason="a signal")

        async def show_now_and_then() -> None:
            while True:
                await trio.sleep(SHOW_EVERY_S)
                show(run)

        nursery.start_soon(stop_early)
        nursery.start_soon(show_now_and_then)
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
        tokens=tokens.total if run.latencies else None,
        unfinished=run.unfinished,
    )


@contextmanager
def _showing(console: Console, title: str, load: LoadOptions) -> Iterator[Callable[[LoadRun], object]]:
    """Show a bar and what has come back so far, on a terminal."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[counts]}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(title, total=load.duration, counts="")

        def show(run: LoadRun) -> None:
            failed = sum(map(len, run.outcomes.values())) - len(run.latencies)
            counts = f"{len(run.latencies)} answered, {failed} failed, {run.in_flight} in flight"
            progress.update(bar, completed=run.measured_s, counts=counts)

        yield show
