"""How many requests a second, at which latency? Compared with a naive server on the same machine.

One text of 34 tokens per request. Ours is measured with the engine in processes and in the one that answers: the reason
for the default of ``--engine``. All servers stay alive and are loaded in turns.

    python -m benchmarks.throughput
"""

import base64
import json
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import attrs
import cyclopts
import httpx
import numpy as np
import trio
from attrs import define, field, frozen
from cyclopts import Parameter

from benchmarks.load import LoadJob, LoadResult, health_probe, run_load, run_load_and_probe
from benchmarks.machine import describe_machine
from benchmarks.model import MODEL_NAME, Texts, check_vectors, oracle_vectors
from benchmarks.report import (
    RESULTS,
    open_figure,
    open_steps,
    print_table,
    settings_document,
    warn_if_busy,
    write_figure,
    write_json,
)
from benchmarks.servers import Server, open_naive, open_ours

TOKENS = 34

TEXTS = 512

CHECKED_TEXTS = 32


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """What is run."""

    rounds: int = 5
    seconds: float = 8.0
    clients: Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative=())] = (1, 8, 32)
    output_dir: Path = RESULTS


@frozen
class Contender:
    """A server, and the bodies of its requests."""

    name: str
    server: Server
    bodies: list[str]

    async def check(self, oracle: np.ndarray) -> float:
        """Return the least cosine of this contender's vectors with the oracle's. Raises ``WrongAnswerError``."""
        async with httpx.AsyncClient(base_url=self.server.url, trust_env=False, timeout=60) as client:
            answers = [await self._vector(client, body) for body in self.bodies[: len(oracle)]]
        return check_vectors(np.array(answers), oracle)

    async def _vector(self, client: httpx.AsyncClient, body: str) -> np.ndarray:
        answer = await client.post("/v1/embeddings", content=body, headers={"Content-Type": "application/json"})
        document = answer.raise_for_status().json()
        if document["usage"]["prompt_tokens"] != TOKENS:
            raise ValueError(f"{self.name} has read {document['usage']} instead of {TOKENS} tokens")
        embedding = document["data"][0]["embedding"]
        if isinstance(embedding, str):
            return np.frombuffer(base64.b64decode(embedding), dtype="<f4")
        return np.array(embedding, dtype=np.float32)

    def job(self, clients: int, seconds: float) -> LoadJob:
        """Return the load of ``clients`` closed-loop clients."""
        return LoadJob(port=self.server.port, bodies=self.bodies, clients=clients, seconds=seconds)


def contenders(ours: Server, local: Server, naive: Server, texts: list[str]) -> list[Contender]:
    """Return the compared servers. All get the same requests, but the second, whose are those of openai-python."""
    plain = [json.dumps({"model": MODEL_NAME, "input": text, "encoding_format": "float"}) for text in texts]
    encoded = [json.dumps({"model": MODEL_NAME, "input": text, "encoding_format": "base64"}) for text in texts]
    return [
        Contender("ours", ours, plain),
        Contender("ours, base64", ours, encoded),
        Contender("ours, engine local", local, plain),
        Contender("naive", naive, plain),
    ]


@define
class Measurements:
    """All rounds, by contender and clients; ``health`` by contender, under the most clients."""

    loads: dict[tuple[str, int], list[LoadResult]] = field(factory=partial(defaultdict, list))
    health: dict[str, list[LoadResult]] = field(factory=partial(defaultdict, list))

    def median(self, name: str, clients: int, quantity: str) -> float:
        """Return the median of a quantity over the rounds."""
        return median(getattr(result, quantity) for result in self.loads[name, clients])

    def median_health(self, name: str, quantity: str) -> float:
        """Return the same for ``/health``."""
        return median(getattr(result, quantity) for result in self.health[name])

    def ratio(self, name: str, clients: int) -> float:
        """Return requests/s over those of the naive server: the median of each round's ratio."""
        pairs = zip(self.loads[name, clients], self.loads["naive", clients], strict=True)
        return median(result.requests_per_s / naive.requests_per_s for result, naive in pairs)

    def as_document(self) -> dict[str, Any]:
        """Return everything for JSON."""
        loads = [
            {"contender": name, "clients": clients, "ratio": self.ratio(name, clients), "rounds": _rounds(results)}
            for (name, clients), results in self.loads.items()
        ]
        health = [{"contender": name, "rounds": _rounds(results)} for name, results in self.health.items()]
        return {"loads": loads, "health_under_most_clients": health}


def _rounds(results: list[LoadResult]) -> list[dict[str, Any]]:
    return [attrs.asdict(result) for result in results]


async def measure(compared: list[Contender], settings: Settings) -> Measurements:
    """Load the contenders in turns, round after round."""
    measured = Measurements()
    alone = [contender for contender in compared if contender.name != "ours, base64"]
    steps = len(compared) * len(settings.clients)
    with open_steps("warming up", len(compared)) as step:
        for contender in compared:
            step(contender.name)
            await run_load(contender.job(max(settings.clients), min(3.0, settings.seconds)))
    with open_steps("measuring", settings.rounds * (steps + len(alone))) as step:
        for _ in range(settings.rounds):
            for clients in settings.clients:
                for contender in compared:
                    step(f"{contender.name}, {clients} clients")
                    result = await run_load(contender.job(clients, settings.seconds))
                    measured.loads[contender.name, clients].append(result)
            for contender in alone:
                step(f"{contender.name}, /health")
                measured.health[contender.name].append(await _probe_health(contender, settings))
    return measured


async def _probe_health(contender: Contender, settings: Settings) -> LoadResult:
    load = contender.job(max(settings.clients), settings.seconds)
    _, health = await run_load_and_probe(load, health_probe(contender.server.port, settings.seconds))
    return health


def show(measured: Measurements, settings: Settings) -> None:
    """Print the tables."""
    columns = ["server", *(f"{count} clients: req/s (× naive), p50 / p99 ms" for count in settings.clients)]
    names = dict.fromkeys(name for name, _ in measured.loads)
    rows = [[name, *(_cell(measured, name, count) for count in settings.clients)] for name in names]
    print_table(f"one text of {TOKENS} tokens per request", columns, rows)
    columns = ["server", "p50 ms", "p95 ms", "p99 ms", "max ms"]
    quantities = ("p50_ms", "p95_ms", "p99_ms", "max_ms")
    rows = [[name, *(f"{measured.median_health(name, q):.2f}" for q in quantities)] for name in measured.health]
    print_table(f"/health under {max(settings.clients)} clients", columns, rows)


def _cell(measured: Measurements, name: str, clients: int) -> str:
    rate, p50, p99 = (measured.median(name, clients, q) for q in ("requests_per_s", "p50_ms", "p99_ms"))
    return f"{rate:.0f} ({measured.ratio(name, clients):.2f}), {p50:.1f} / {p99:.1f}"


def draw(measured: Measurements, settings: Settings) -> None:
    """Plot requests/s and latency by clients."""
    figure, (rates, latencies) = open_figure(2)
    for index, name in enumerate(dict.fromkeys(name for name, _ in measured.loads)):
        series = {
            quantity: [measured.median(name, count, quantity) for count in settings.clients]
            for quantity in ("requests_per_s", "p50_ms", "p99_ms")
        }
        style: dict[str, Any] = {"color": f"C{index}", "marker": "o"}
        rates.plot(settings.clients, series["requests_per_s"], label=name, **style)
        latencies.plot(settings.clients, series["p50_ms"], label=f"{name}, p50", **style)
        latencies.plot(settings.clients, series["p99_ms"], label=f"{name}, p99", linestyle=":", **style)
    rates.set(title="Requests per second", ylim=(0, None))
    latencies.set(title="Latency, ms", yscale="log")
    for axis in (rates, latencies):
        axis.set_xscale("log", base=2)
        axis.set_xticks(settings.clients, map(str, settings.clients))
        axis.set_xlabel(f"clients, one text of {TOKENS} tokens each")
        axis.legend(frameon=False)
    write_figure(figure, settings.output_dir, "throughput")


async def run(settings: Settings) -> None:
    """Check the answers, measure, report."""
    machine = describe_machine()
    warn_if_busy(machine)
    texts = Texts().make(TEXTS, TOKENS)
    oracle = oracle_vectors(texts[:CHECKED_TEXTS])
    async with (
        open_ours("--engine", "process") as ours,
        open_ours("--engine", "local") as local,
        open_naive() as naive,
    ):
        compared = contenders(ours, local, naive, texts)
        cosines = {contender.name: await contender.check(oracle) for contender in compared}
        measured = await measure(compared, settings)
    show(measured, settings)
    document = {
        "machine": machine,
        "settings": settings_document(settings),
        "model": MODEL_NAME,
        "tokens": TOKENS,
        "least_cosine_with_float32": cosines,
        **measured.as_document(),
    }
    write_json(settings.output_dir, "throughput", document)
    draw(measured, settings)


def main(settings: Settings = Settings()) -> None:
    """Measure requests per second and latency, compared with a naive server."""
    trio.run(run, settings)


if __name__ == "__main__":
    cyclopts.run(main)
