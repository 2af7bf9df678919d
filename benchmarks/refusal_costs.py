"""What does it cost to refuse a request? CPU time of the event loop per answer and per refusal.

A server whose queue is full refuses more requests than it answers, so a refusal must cost much less. Answers are
measured first, then one request of many long texts fills the queue, and all others are refused with 429. Each over kept
connections and over new ones, one request after the other. What the loop does for the request that fills the queue
meanwhile is in the costs of the refusals.

    python -m benchmarks.refusal_costs
"""

import json
import socket
from pathlib import Path
from typing import Literal, TypeAlias

import cyclopts
import trio
from attrs import frozen
from cyclopts import Parameter

from benchmarks.machine import describe_machine
from benchmarks.model import MODEL_NAME, Texts
from benchmarks.report import RESULTS, open_steps, print_table, settings_document, write_json
from benchmarks.rounds import Rounds
from benchmarks.servers import Server, open_ours
from trio_pool_serve.load.client_connection import request_bytes

Kind: TypeAlias = Literal["answer, kept", "answer, new", "refusal, kept", "refusal, new"]

KINDS: tuple[Kind, ...] = ("answer, kept", "answer, new", "refusal, kept", "refusal, new")

FILLING_TEXTS = 2000
"""Of 200 words: about a minute of work for two cores."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """What is run: ``requests`` of each kind in each round."""

    rounds: int = 3
    requests: int = 1000
    output_dir: Path = RESULTS


@frozen
class Cost:
    """CPU time of the event loop's thread per request."""

    loop_us: float


def loop_cpu_s(server: Server) -> float:
    """Return the CPU time of the server's main thread so far."""
    nanoseconds = Path(f"/proc/{server.pid}/task/{server.pid}/schedstat").read_text().split()[0]
    return int(nanoseconds) / 1e9


async def measure(server: Server, kind: Kind, settings: Settings) -> Cost:
    """Return what requests of a kind cost. Raises ``ValueError`` for another status. Cancellation: after a response."""
    status = b"200" if kind.startswith("answer") else b"429"
    request = request_bytes("/v1/embeddings", json.dumps({"input": Texts().make(1, 34)[0]}).encode())
    before = loop_cpu_s(server)
    await trio.to_thread.run_sync(_ask_often, server.port, request, status, kind.endswith("new"), settings.requests)
    return Cost(1e6 * (loop_cpu_s(server) - before) / settings.requests)


def _ask_often(port: int, request: bytes, status: bytes, is_new: bool, times: int) -> None:  # noqa: FBT001
    connection = socket.create_connection(("127.0.0.1", port))
    for _ in range(times):
        if is_new:
            connection.close()
            connection = socket.create_connection(("127.0.0.1", port))
        found = _ask(connection, request)
        if found != status:
            raise ValueError(f"status {found.decode()} where {status.decode()} was expected")
    connection.close()


def _ask(connection: socket.socket, request: bytes) -> bytes:
    """Return the status of the response, which is read to its end."""
    connection.sendall(request)
    response = b""
    while (end := response.find(b"\r\n\r\n")) < 0:
        response += connection.recv(2**16)
    length = int(response[:end].lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(response) < end + 4 + length:
        response += connection.recv(2**16)
    return response[9:12]


async def measure_round(settings: Settings) -> dict[Kind, Cost]:
    """Measure all kinds once, with one server. Cancellation: the server is stopped."""
    filling = request_bytes(
        "/v1/embeddings", json.dumps({"input": [" ".join(["word"] * 200)] * FILLING_TEXTS}).encode()
    )
    # With the least of bounds any request is refused while another waits; nothing waits when answers are measured.
    async with open_ours("--max-queue-s", "0.001") as server:
        costs = {kind: await measure(server, kind, settings) for kind in KINDS if kind.startswith("answer")}
        with socket.create_connection(("127.0.0.1", server.port)) as filler:
            await trio.to_thread.run_sync(filler.sendall, filling)
            await trio.sleep(5)  # until it is tokenised, and the rate is known: this is a measurement, not a test
            costs |= {kind: await measure(server, kind, settings) for kind in KINDS if kind.startswith("refusal")}
    return costs


async def run(settings: Settings) -> None:
    """Measure in rounds, and write the results. Cancellation: at once; the server is stopped."""
    machine = describe_machine()
    rounds: Rounds[Kind] = Rounds()
    with open_steps("refusals", settings.rounds) as step:
        for number in range(settings.rounds):
            step(f"round {number + 1}")
            for kind, cost in (await measure_round(settings)).items():
                rounds.add(kind, cost)
    rows = [
        [
            kind,
            f"{rounds.median(kind, 'loop_us'):.0f}",
            f"{rounds.ratio(kind, 'loop_us', KINDS[0] if kind.endswith('kept') else KINDS[1]):.2f}",
        ]
        for kind in KINDS
    ]
    print_table(f"CPU time of the event loop per request, {MODEL_NAME}", ["request", "µs", "÷ answer"], rows)
    document = {"machine": machine, "settings": settings_document(settings), "kinds": rounds.as_document("kind")}
    write_json(settings.output_dir, "refusal_costs", document)


def main(settings: Settings = Settings()) -> None:
    """Compare what refusals and answers cost the event loop."""
    trio.run(run, settings)


if __name__ == "__main__":
    cyclopts.run(main)
