"""Which requests does a server lose when it is stopped under load? By kind of server and of connection.

Closed-loop clients, half of them over connections that they keep, are sending when the server gets SIGTERM. What they
had written until then has to be answered. A connection that is refused, or closed between two requests, loses
nothing: the client has written nothing that it gets no answer to.

    python -m benchmarks.drain
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import cyclopts
import trio
from attrs import define, field, frozen
from cyclopts import Parameter

from benchmarks.machine import describe_machine
from benchmarks.model import MODEL_NAME, MODEL_PATH, Texts
from benchmarks.open_loop import CONTENT_LENGTH
from benchmarks.report import RESULTS, open_figure, open_steps, print_table, settings_document, write_figure, write_json
from benchmarks.servers import READY_TIMEOUT_S, ROOT, free_port, wait_for_ok
from trio_pool_serve.load.client_connection import request_bytes

TOKENS = 34

EXIT_TIMEOUT_S = 60.0

ANSWERED, REFUSED, LOST, BETWEEN, NO_CONNECTION = "answered", "refused", "lost", "closed between", "no connection"
"""A response with 200; one with another status; none, though the request had been written; the kept connection was
closed between two requests, as the client was about to write the next; not accepted."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """What is run: each server is stopped once per round, after ``seconds`` of load by ``clients``."""

    rounds: int = 3
    seconds: float = 3.0
    clients: int = 16
    output_dir: Path = RESULTS


def commands(port: int) -> dict[str, list[str]]:
    """Return the servers by their names: the command of each."""
    ours = [sys.executable, "-m", "trio_pool_serve", "serve", f"{MODEL_NAME}={MODEL_PATH}", "--port", str(port)]
    plain = [sys.executable, "-m", "hypercorn", "--config", "docs/hypercorn.toml", "--worker-class", "trio"]
    return {
        "local engine": [*ours, "--engine", "local"],
        "engine processes": [*ours, "--engine", "process"],
        "4 API processes": [*ours, "--engine", "process", "--api-workers", "4"],
        "plain hypercorn": [*plain, "--bind", f"127.0.0.1:{port}", "trio_pool_serve.asgi:app"],
    }


@define
class Stopped:
    """One server, stopped once: how the requests that were not answered before the signal ended."""

    server: str
    before: int = 0
    """Requests answered before the signal."""
    after: Counter[str] = field(factory=Counter)
    exit_status: int | None = None
    took_s: float = 0.0


@define(eq=False)
class Clients:
    """Threads that send requests until they cannot connect any more."""

    port: int
    request: bytes
    stopped: threading.Event = field(init=False, factory=threading.Event)
    """Set just before the signal."""
    ends: list[tuple[bool, str]] = field(init=False, factory=list)
    """Whether it ended after the signal, and how, for each request."""

    def run(self, *, keeps: bool) -> None:
        """Send requests one after the other, over a connection each or over one."""
        connection: socket.socket | None = None
        while True:
            if connection is None:
                try:
                    connection = socket.create_connection(("127.0.0.1", self.port), timeout=EXIT_TIMEOUT_S)
                except OSError:
                    self.ends.append((self.stopped.is_set(), NO_CONNECTION))
                    return
                reused = False
            end, closes = self._ask(connection, reused=reused)
            self.ends.append((self.stopped.is_set(), end))
            if closes or not keeps:
                connection.close()
                connection = None
            reused = True

    def _ask(self, connection: socket.socket, *, reused: bool) -> tuple[str, bool]:
        """Return how a request ended, and whether the connection is at its end."""
        answer = b""
        try:
            connection.sendall(self.request)
            while b"\r\n\r\n" not in answer:
                if not (chunk := connection.recv(65536)):
                    raise ConnectionResetError
                answer += chunk
            head, _, body = answer.partition(b"\r\n\r\n")
            length = CONTENT_LENGTH.search(head)
            while len(body) < int(length[1] if length else 0):
                if not (chunk := connection.recv(65536)):
                    raise ConnectionResetError
                body += chunk
        except OSError:
            # HTTP/1.1 lets a server close an idle connection at any time: a client has to send such a request again.
            return (BETWEEN if reused and not answer else LOST), True
        closes = b"\r\nconnection: close" in head.lower()
        return (ANSWERED if head[9:12] == b"200" else REFUSED), closes


def stop_under_load(name: str, settings: Settings, request: bytes) -> Stopped:
    """Start a server, stop it under load, and return what became of the requests. Runs in a thread."""
    port = free_port()
    stopped = Stopped(name)
    with _running(commands(port)[name]) as process:
        clients = Clients(port, request)
        trio.run(_wait_ready, port)
        threads = [
            threading.Thread(target=clients.run, kwargs={"keeps": bool(number % 2)})
            for number in range(settings.clients)
        ]
        for thread in threads:
            thread.start()
        time.sleep(settings.seconds)
        clients.stopped.set()
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            stopped.exit_status = process.wait(EXIT_TIMEOUT_S)
        stopped.took_s = time.monotonic() - began
        for thread in threads:
            thread.join()
    stopped.before = sum(not after for after, _ in clients.ends)
    stopped.after = Counter(end for after, end in clients.ends if after)
    return stopped


async def _wait_ready(port: int) -> None:
    with trio.fail_after(READY_TIMEOUT_S):
        await wait_for_ok(f"http://127.0.0.1:{port}/readyz")


@contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "TRIO_POOL_SERVE_MODEL": f"{MODEL_NAME}={MODEL_PATH}"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def show(all_stopped: Sequence[Stopped]) -> None:
    """Print the table: all rounds of each server together."""
    ends = (ANSWERED, REFUSED, LOST, BETWEEN)
    rows = []
    for name in dict.fromkeys(each.server for each in all_stopped):
        rounds = [each for each in all_stopped if each.server == name]
        after = sum((each.after for each in rounds), Counter[str]())
        exits = " ".join(str(each.exit_status) for each in rounds)
        took = max(each.took_s for each in rounds)
        before = sum(each.before for each in rounds)
        rows.append([name, str(before), *(str(after[end]) for end in ends), exits, f"{took:.1f}"])
    columns = [
        "server",
        "answered before",
        "then: answered",
        "refused",
        "lost",
        "closed between",
        "exits",
        "longest, s",
    ]
    print_table("Requests that had been written when the server was stopped", columns, rows)


def draw(all_stopped: Sequence[Stopped], settings: Settings) -> None:
    """Plot how the requests after the signal ended, by server."""
    figure, (axis,) = open_figure(1)
    names = [*dict.fromkeys(each.server for each in all_stopped)]
    left = [0] * len(names)
    for end in (ANSWERED, REFUSED, LOST, BETWEEN):
        widths = [sum(each.after[end] for each in all_stopped if each.server == name) for name in names]
        axis.barh(names, widths, left=left, label=end)
        left = [sum(pair) for pair in zip(left, widths, strict=True)]
    axis.set(title="Requests after SIGTERM", xlabel="requests")
    axis.legend(frameon=False)
    write_figure(figure, settings.output_dir, "drain")


async def run(settings: Settings) -> None:
    """Measure and report. Cancellation: once the server that is being stopped has ended."""
    machine = describe_machine()
    texts = Texts().make(8, TOKENS)
    request = request_bytes("/v1/embeddings", json.dumps({"model": MODEL_NAME, "input": texts}).encode())
    all_stopped = []
    names = [*commands(0)]
    with open_steps("drain", settings.rounds * len(names)) as step:
        for _ in range(settings.rounds):
            for name in names:
                step(name)
                all_stopped.append(await trio.to_thread.run_sync(stop_under_load, name, settings, request))
    show(all_stopped)
    document = {
        "machine": machine,
        "settings": settings_document(settings),
        "stops": [
            {
                "server": each.server,
                "before": each.before,
                "after": dict(each.after),
                "exit_status": each.exit_status,
                "took_s": each.took_s,
            }
            for each in all_stopped
        ],
    }
    write_json(settings.output_dir, "drain", document)
    draw(all_stopped, settings)


def main(settings: Settings = Settings()) -> None:
    """Count the requests that a server loses when it is stopped."""
    trio.run(run, settings)


if __name__ == "__main__":
    cyclopts.run(main)
