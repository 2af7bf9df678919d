"""Tokens and requests per second of the real server, and what HTTP adds to a request.

BERT-base with random weights, as published results for embedding models of that size have it. The answers are compared
with float32 before any time is measured.
"""

import re
import time
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from statistics import mean, median

import attrs
import httpx
import numpy as np
import trio
from attrs import define, field, frozen

from benchmarks.aim import Aim
from benchmarks.answers import check_answers, embeddings_body
from benchmarks.gpu.busy_share import BusyShare, watch
from benchmarks.gpu.generators import GeneratedLoad, RequestFailedError, generate
from benchmarks.gpu.loaded_runner import graph_shapes, runner_arguments
from benchmarks.gpu.part import Findings, Subject
from benchmarks.load import LoadJob
from benchmarks.model import LEAST_COSINE, Texts, oracle_vectors
from benchmarks.offline import Offline, OfflineJob, OfflineResult, open_offline
from benchmarks.report import markdown_table, open_figure, write_figure
from benchmarks.servers import Server, open_server
from trio_pool_serve.runner.cuda.packed_inputs import PackedShape

DIFFERENT_TEXTS = 512
"""Of a load."""

CHECKED_TEXTS = 8

RAMP_S = 1.0

WARM_UP_S = 1.0

ANSWER_S = 30.0
"""How much longer than the measured time the last answer of a load may take."""


@frozen(kw_only=True)
class ServerLoad:
    """Closed-loop clients, and the aim in requests or tokens per second. ``server`` is named if there are several."""

    aim: Aim
    server: str = ""
    tokens: int
    clients: int
    texts: int = 1
    counts_tokens: bool = False
    note: str = ""

    def rate(self, result: GeneratedLoad) -> float:
        """Return what the aim counts, per second."""
        return result.requests_per_s * (self.texts * self.tokens if self.counts_tokens else 1)


LOADS = (
    *(
        ServerLoad(
            aim=Aim(row=f"tokens/s: 50 tokens × {texts} a request, 1024 clients", at_least=1.6e6),
            tokens=50,
            clients=1024,
            texts=texts,
            counts_tokens=True,
        )
        for texts in (1, 16, 64)
    ),
    ServerLoad(aim=Aim(row="requests/s: 32 tokens, 64 clients", at_least=5 * 1089), tokens=32, clients=64),
    ServerLoad(
        aim=Aim(row="requests/s: 512 tokens, 64 clients"),
        tokens=512,
        clients=64,
        note="published: 253 for multilingual-e5-base (vLLM #38559)",
    ),
)
"""1.6 million: Snowflake's arctic-embed-m on an H200. 1089: bge-base-en-v1.5 (vLLM #39113)."""

ADDED = Aim(row="ms: online − offline, 32 tokens, 1 client (p50)", at_most=0.7)

COSINE = Aim(row="least cosine of the server's vectors with float32", at_least=LEAST_COSINE)

ALONE = ServerLoad(aim=ADDED, tokens=32, clients=1)

TINY_CLIENTS = {1024: 16, 256: 8, 64: 8}
"""Clients for the tiny shape, by those for the base shape."""


@define
class Measured:
    """All rounds so far, by load; the busy share of the GPU in each, percent; and why a load does not count."""

    results: dict[Aim, list[GeneratedLoad]] = field(factory=dict)
    busy: dict[Aim, list[float]] = field(factory=dict)
    batch_tokens: dict[Aim, list[float]] = field(factory=dict)
    """Mean tokens of a batch in each round, without padding."""
    shapes: Sequence[PackedShape] = ()
    """Shapes of the CUDA graphs; empty if they are not known."""
    failures: dict[Aim, str] = field(factory=dict)
    offline: list[OfflineResult] = field(factory=list)
    """For each round of ``ALONE``."""

    def fill_of(self, load: ServerLoad) -> float | None:
        """Return the share of the tokens of a batch of mean size in the smallest graph that has room for it."""
        tokens = mean(self.batch_tokens.get(load.aim) or [0.0])
        fitting = [shape.tokens for shape in self.shapes if shape.tokens >= tokens]
        return tokens / min(fitting) if tokens and fitting else None


async def run(subject: Subject, findings: Findings) -> None:
    """Start the server, check its answers, load it round after round. Cancellation: server and clients are stopped.

    Rows that were measured before a failure stay.
    """
    settings = subject.settings
    loads = [scaled(load, subject) for load in LOADS]
    flags = settings.server_flags()
    findings.texts.append(
        f"`trio-pool-serve serve MODEL {' '.join(flags)}`; load processes: {settings.load_processes}."
    )
    findings.details["server_flags"] = flags
    measured = Measured(shapes=graph_shapes(subject.bert, subject.settings))
    subject.note_step("the server starts")
    module = ["trio_pool_serve", "serve", str(subject.bert), *flags]
    began = time.perf_counter()
    try:
        async with open_server("ours", module, ready_path="/readyz") as server, watch(subject.gpu) as busy:
            findings.details["start_s"] = time.perf_counter() - began
            subject.note_step("checking answers")
            cosine = await check(server, subject.bert, {load.tokens for load in loads})
            findings.measured(COSINE, cosine)
            rounds = await measure(server, loads, busy, measured, subject)
            findings.texts.append(f"Rounds: {rounds}.")
            if busy.problem:
                findings.texts.append(f"The GPU's busy share was not measured: {busy.problem}.")
    finally:
        judge(loads, measured, findings)
    if measured.results:
        draw(loads, measured, settings.folder)
        findings.texts.append("![Rates and latencies](gpu_load.png)")


def scaled(load: ServerLoad, subject: Subject) -> ServerLoad:
    """Return a load with as many clients as the shape is to have."""
    if subject.settings.shape == "base":
        return load
    return attrs.evolve(load, clients=TINY_CLIENTS.get(load.clients, load.clients))


async def check(server: Server, folder: Path, lengths: Collection[int]) -> float:
    """Return the least cosine of the server's vectors with float32, for texts of these lengths.

    Raises ``WrongAnswerError``, and ``HTTPStatusError`` if a request fails.
    """
    cosines = []
    for tokens in sorted(lengths):
        texts, oracle = await trio.to_thread.run_sync(_checked, tokens, str(folder))
        cosines.append(await check_answers(server.url, texts, oracle, str(folder)))
    return min(cosines)


@cache
def _checked(tokens: int, folder: str) -> tuple[list[str], np.ndarray]:
    texts = Texts().make(CHECKED_TEXTS, tokens)
    return texts, oracle_vectors(texts, folder)


async def measure(
    server: Server, loads: Sequence[ServerLoad], busy: BusyShare, measured: Measured, subject: Subject
) -> int:
    """Run all loads in turns, after a short round that does not count; return the number of rounds.

    There are fewer than in the settings if another one would not end in time. A load that fails is left out from then
    on.
    """
    settings = subject.settings
    jobs = {load.aim: load_job(server, load, str(subject.bert), settings.seconds) for load in (*loads, ALONE)}
    for load in loads:
        await _run(load, attrs.evolve(jobs[load.aim], seconds=WARM_UP_S), measured, subject)
    async with open_offline(*runner_arguments(subject.bert, settings)) as offline:
        for number in range(settings.rounds):
            began = trio.current_time()
            for load in loads:
                await measure_load(load, jobs[load.aim], busy, measured, subject)
            await measure_alone(ALONE, jobs[ADDED], offline, measured, subject)
            if trio.current_time() - began > trio.current_effective_deadline() - trio.current_time():
                return number + 1
    return settings.rounds


async def measure_load(
    load: ServerLoad, job: LoadJob, busy: BusyShare, measured: Measured, subject: Subject
) -> GeneratedLoad | None:
    """Run a load once; ``None`` if a request fails, or has failed before."""
    before = await _batches_so_far(job.port)
    result = await _run(load, job, measured, subject)
    if result is None:
        return None
    tokens, batches = (after - b for after, b in zip(await _batches_so_far(job.port), before, strict=True))
    share = busy.between(result.began, result.ended)
    measured.results.setdefault(load.aim, []).append(result)
    measured.busy.setdefault(load.aim, []).extend([] if share is None else [share])
    measured.batch_tokens.setdefault(load.aim, []).extend([tokens / batches] if batches else [])
    return result


async def measure_alone(load: ServerLoad, job: LoadJob, offline: Offline, measured: Measured, subject: Subject) -> None:
    """Run the load of one client, and the same texts without a server."""
    if result := await _run(load, job, measured, subject):
        alone = OfflineJob(way="text", batch=load.texts, tokens=load.tokens, seconds=job.seconds / 2)
        measured.offline.append(await offline.measure(alone))
        measured.results.setdefault(load.aim, []).append(result)


async def _run(load: ServerLoad, job: LoadJob, measured: Measured, subject: Subject) -> GeneratedLoad | None:
    if load.aim in measured.failures:
        return None
    subject.note_step(load.aim.row)
    try:
        return await generate(job, subject.settings.load_processes, within_s=job.ramp_s + job.seconds + ANSWER_S)
    except RequestFailedError as error:
        measured.failures[load.aim] = str(error)
        return None


async def _batches_so_far(port: int) -> tuple[float, float]:
    """Return the tokens of all batches of a server, and the number of batches."""
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    tokens, batches = (
        sum(map(float, re.findall(rf"^trio_pool_serve_{name}\{{.*\}} (\S+)$", text, re.MULTILINE)))
        for name in ("tokens_total", "batch_tokens_count")
    )
    return tokens, batches


def load_job(server: Server, load: ServerLoad, model: str, seconds: float) -> LoadJob:
    """Return the requests of a load, with different texts."""
    bodies = _bodies(load.texts, load.tokens, model)
    return LoadJob(port=server.port, bodies=bodies, clients=load.clients, seconds=seconds, ramp_s=min(RAMP_S, seconds))


@cache
def _bodies(count: int, tokens: int, model: str) -> list[str]:
    texts = Texts().make(max(1, DIFFERENT_TEXTS // count) * count, tokens)
    requests = [texts[begin : begin + count] for begin in range(0, len(texts), count)]
    inputs = requests if count > 1 else texts
    return [embeddings_body(one, model=model, encoding_format="base64") for one in inputs]


def judge(
    loads: Sequence[ServerLoad], measured: Measured, findings: Findings, alone: ServerLoad | None = ALONE
) -> None:
    """Write down everything that was measured: rows, a table, and all rounds."""
    lines = []
    for load in loads:
        results, failure = measured.results.get(load.aim, []), measured.failures.get(load.aim)
        if failure is not None:
            findings.not_measured(load.aim, f"invalid: {failure}")
        elif results:
            rate = median(load.rate(result) for result in results)
            findings.measured(load.aim, rate, "; ".join(filter(None, (load.note, saturation(results)))))
            lines.append(_line(load, measured))
    if alone is not None:
        _judge_alone(alone.aim, measured, findings)
    if lines:
        findings.texts.append(markdown_table(COLUMNS, lines))
    findings.details["loads"] = [
        {
            **attrs.asdict(load),
            "gpu_busy_percent": measured.busy.get(load.aim, []),
            "mean_batch_tokens": measured.batch_tokens.get(load.aim, []),
            "rounds": [attrs.asdict(result) for result in measured.results.get(load.aim, [])],
        }
        for load in (*loads, *([alone] if alone else []))
    ]
    findings.details["offline"] = [attrs.asdict(result) for result in measured.offline]


def _judge_alone(aim: Aim, measured: Measured, findings: Findings) -> None:
    if aim in measured.failures:
        findings.not_measured(aim, f"invalid: {measured.failures[aim]}")
    elif online := measured.results.get(aim):
        pairs = list(zip(online, measured.offline, strict=True))
        offline_ms = median(off.p50_ms for _, off in pairs)
        added_ms = median(on.p50_ms - off.p50_ms for on, off in pairs)
        findings.measured(aim, added_ms, f"offline {offline_ms:.2f} ms; {saturation(online)}".removesuffix("; "))


def saturation(results: Sequence[GeneratedLoad]) -> str:
    """Return a warning if the load processes may have been the limit."""
    return "the load processes were saturated" if any(result.is_saturated for result in results) else ""


COLUMNS = (
    "load", "requests/s", "tokens/s", "p50 ms", "p99 ms", "GPU busy", "busiest load process", "tokens a batch", "fill",
)  # fmt: skip
"""fill: that of a batch of mean size, ``Measured.fill_of``."""


def _line(load: ServerLoad, measured: Measured) -> list[str]:
    results, busy = measured.results[load.aim], measured.busy.get(load.aim, [])
    requests_per_s = median(result.requests_per_s for result in results)
    batch_tokens, fill = measured.batch_tokens.get(load.aim), measured.fill_of(load)
    return [
        f"{load.server}: {load.tokens} tokens × {load.texts}, {load.clients} clients".removeprefix(": "),
        f"{requests_per_s:,.0f}",
        f"{requests_per_s * load.texts * load.tokens:,.0f}",
        f"{median(result.p50_ms for result in results):.1f}",
        f"{median(result.p99_ms for result in results):.1f}",
        f"{mean(busy):.0f} %" if busy else "–",
        f"{max(max(result.cpu_shares) for result in results):.0%} of a core",
        f"{mean(batch_tokens):,.0f}" if batch_tokens else "–",
        f"{fill:.0%}" if fill else "–",
    ]


def draw(loads: Sequence[ServerLoad], measured: Measured, folder: Path) -> None:
    """Plot tokens per second with the GPU's busy share, and latencies."""
    figure, (tokens, latencies) = open_figure(2)
    shown = [load for load in loads if load.aim in measured.results]
    names = [f"{load.tokens} × {load.texts},\n{load.clients} clients" for load in shown]
    results = [measured.results[load.aim] for load in shown]
    rates = [
        median(result.requests_per_s for result in rounds) * load.texts * load.tokens
        for load, rounds in zip(shown, results, strict=True)
    ]
    bars = tokens.bar(names, rates)
    shares = [measured.busy.get(load.aim, []) for load in shown]
    tokens.bar_label(bars, [f"GPU {mean(share):.0f} %" if share else "" for share in shares], fontsize=7)
    tokens.set(title="Tokens per second, and how busy the GPU is", ylim=(0, None))
    for quantity in ("p50_ms", "p99_ms"):
        values = [median(getattr(result, quantity) for result in rounds) for rounds in results]
        latencies.plot(names, values, "o", label=quantity.removesuffix("_ms"))
    latencies.set(title="Latency, ms", yscale="log")
    latencies.legend(frameon=False)
    for axis in (tokens, latencies):
        axis.tick_params(axis="x", labelsize=7)
    write_figure(figure, folder, "gpu_load")
