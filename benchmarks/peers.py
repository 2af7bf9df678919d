"""Our server compared with running servers of OpenAI's dialect: ``--peer NAME=URL[,MODEL[,PID]]``, repeatedly.

By clients, by tokens per text, and by texts per request; all servers in turns. A peer must serve the same model: its
answers are compared with the model's before anything is timed. On this machine the CPU time of the process that listens
and its descendants is measured; PID names another process for that.

    python -m benchmarks.peers --peer vllm=http://127.0.0.1:8001,all-MiniLM-L6-v2
"""

import itertools
import shlex
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Annotated
from urllib.parse import urlsplit

import attrs
import cyclopts
import httpx
import psutil
from attrs import frozen
from cyclopts import Parameter

from benchmarks.aim import COLUMNS, Aim
from benchmarks.answers import ask, bodies_of, embeddings_body, vectors_of
from benchmarks.load import LoadJob, run_load
from benchmarks.model import (
    MODEL_NAME,
    MODEL_PATH,
    Texts,
    check_vectors,
    least_cosine_of,
    name_of,
    oracle_vectors,
    result_name,
)
from benchmarks.report import RESULTS, Numbers, Report, command_of, open_figure, open_steps, print_table, write_figure
from benchmarks.rounds import Rounds
from benchmarks.thread_clocks import listening_process
from benchmarks.variants import LONG_TEXTS, OURS, PATIENT, open_variants, say_not_measured

TEXTS = 256
"""At least, of each length; more where a request has more."""

CHECKED_TEXTS = 8

BATCH_CLIENTS = 8
"""Clients that send several texts per request."""

BARS: Mapping[tuple[int, int], tuple[float, float]] = {
    (1, 1): (1.8, 2.0),
    (8, 1): (1.6, 2.0),
    (32, 1): (1.7, 2.0),
    (128, 1): (1.8, 2.0),
    (BATCH_CLIENTS, 64): (1.9, 2.2),
}
"""Requests/s of ours ÷ vLLM's on CPU: the bar and the aim, by clients and texts per request."""


class NotAPeerError(Exception):
    """The description of a peer on the command line is not valid."""


@frozen
class Peer:
    """A server, its name of the model, and the root of its processes; 0: not known."""

    name: str
    url: str
    model: str = MODEL_NAME
    root_pid: int = 0

    @classmethod
    def parse(cls, text: str, model: str = MODEL_NAME) -> "Peer":
        """Return the peer that ``NAME=URL[,MODEL[,PID]]`` describes. Raises ``NotAPeerError``."""
        name, equals, rest = text.partition("=")
        url, own_model, pid, *more = [*rest.split(","), "", ""]
        parts = urlsplit(url)
        if not (name and equals and parts.hostname) or parts.scheme != "http" or any(more):
            raise NotAPeerError(f"{text!r} is not NAME=URL[,MODEL[,PID]] with a URL of http")
        if pid and not (pid.isdecimal() and psutil.pid_exists(int(pid))):
            raise NotAPeerError(f"{text!r}: there is no process {pid}")
        return cls(name, url.rstrip("/"), own_model or model, int(pid or 0))

    @property
    def pid(self) -> int:
        """The root of its processes: as given, or the process that listens; 0 on another machine."""
        is_here = urlsplit(self.url).hostname in ("127.0.0.1", "localhost")
        return self.root_pid or (listening_process(self.port) if is_here else 0)

    @property
    def port(self) -> int:
        """The TCP port of its URL."""
        return urlsplit(self.url).port or 80

    def job(self, bodies: list[str], load: "Load", seconds: float) -> LoadJob:
        """Return the load of some clients."""
        parts = urlsplit(self.url)
        return LoadJob(
            host=parts.hostname or "",
            port=self.port,
            path=f"{parts.path}/v1/embeddings",
            server_pid=self.pid,
            bodies=bodies,
            clients=load.clients,
            seconds=seconds,
        )


@frozen
class Load:
    """Closed-loop clients, and the texts of their requests."""

    clients: int
    tokens: int
    batch: int

    def __str__(self) -> str:
        return f"{self.clients} clients, {self.batch} × {self.tokens} tokens"


Many = Numbers


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings: ``seconds`` for each server, load and round.

    The first of ``tokens`` and ``batches`` and the last but one of ``clients`` are kept while another is varied,
    but several texts per request are sent by 8 clients; ``every_combination`` varies all with all. ``model``
    is a folder. ``server_flags`` are for our own, as one string.
    """

    peer: tuple[str, ...] = ()
    model: str = MODEL_PATH
    rounds: int = 5
    seconds: float = 5.0
    clients: Many = (1, 8, 32, 128)
    tokens: Many = (32, 8, 128, 512)
    batches: Many = (1, 16, 64)
    every_combination: Annotated[bool, Parameter(negative=())] = False
    server_flags: Annotated[str, Parameter(allow_leading_hyphen=True)] = ""
    output_dir: Path = RESULTS

    @property
    def result(self) -> str:
        """The name of the results."""
        return result_name("peers", self.model, self.server_flags)

    @property
    def loads(self) -> list[Load]:
        """What every server is put through, each load once."""
        if self.every_combination:
            return [Load(*numbers) for numbers in itertools.product(self.clients, self.tokens, self.batches)]
        middle = Load(self.clients[-2:][0], self.tokens[0], self.batches[0])
        loads = [attrs.evolve(middle, clients=clients) for clients in self.clients]
        loads += [attrs.evolve(middle, tokens=tokens) for tokens in sorted(self.tokens)]
        loads += [attrs.evolve(middle, clients=BATCH_CLIENTS, batch=batch) for batch in self.batches[1:]]
        return list(dict.fromkeys(loads))


async def check(peer: Peer, texts: dict[int, list[str]], model: str, least_cosine: float) -> dict[int, float]:
    """Return, by tokens, the least cosine of a peer's vectors with the oracle's, but for lengths that it refuses.

    Raises ``WrongAnswerError``.
    """
    cosines = {}
    for tokens, of_length in texts.items():
        checked = of_length[:CHECKED_TEXTS]
        try:
            answer = await ask(peer.url, embeddings_body(checked, model=peer.model))
        except httpx.HTTPStatusError:
            continue  # reported when this length is to be measured
        cosines[tokens] = check_vectors(vectors_of(answer.json()), oracle_vectors(checked, model), least_cosine)
    return cosines


async def refuses(peer: Peer, bodies: list[str]) -> bool:
    """Return whether a peer answers such requests with an error, and report it."""
    try:
        await ask(peer.url, bodies[0])
    except httpx.HTTPStatusError as error:
        answer = " ".join(error.response.text.split())[:200]
        say_not_measured(peer.name, f"{error.response.status_code} {answer}")
        return True
    return False


async def measure(peers: list[Peer], texts: dict[int, list[str]], settings: Settings) -> Rounds[tuple[str, Load]]:
    """Put the servers through the loads in turns, round after round, but for what one of them refuses."""
    jobs = {}
    for load, peer in itertools.product(settings.loads, peers):
        bodies = bodies_of(texts[load.tokens], load.batch, model=peer.model)
        if not await refuses(peer, bodies):
            jobs[peer.name, load] = peer.job(bodies, load, settings.seconds)
    measured = Rounds[tuple[str, Load]]()
    with open_steps("measuring", settings.rounds * len(jobs)) as step:
        for _ in range(settings.rounds):
            for (name, load), job in jobs.items():
                step(f"{name}: {load}")
                measured.add((name, load), await run_load(job))
    return measured


def show(peers: list[Peer], measured: Rounds[tuple[str, Load]], settings: Settings) -> None:
    """Print the tables: what each server does, and ours over each other one."""

    def cell(name: str, load: Load) -> str:
        if (name, load) not in measured.results:
            return "refused"
        rate, p50, p99 = (measured.median((name, load), q) for q in ("requests_per_s", "p50_ms", "p99_ms"))
        return f"{rate:.1f}, {rate * load.batch * load.tokens:.0f}, {p50:.1f} / {p99:.1f}, {cpu_ms(name, load)}"

    def cpu_ms(name: str, load: Load) -> str:
        known = [result.server_cpu_ms for result in measured.results[name, load] if result.server_cpu_ms is not None]
        return f"{median(known):.2f}" if known else "–"

    def ratio(ours: str, name: str, load: Load) -> str:
        if (name, load) not in measured.results or (ours, load) not in measured.results:
            return "–"
        return f"{measured.ratio((ours, load), 'requests_per_s', (name, load)):.2f}"

    columns = ["clients", "tokens", "texts per request"]
    ours, *others = (peer.name for peer in peers)
    loads = [(load, [f"{load.clients}", f"{load.tokens}", f"{load.batch}"]) for load in settings.loads]
    rows = [[*words, *(cell(peer.name, load) for peer in peers)] for load, words in loads]
    names = [f"{peer.name}: requests/s, tokens/s, p50 / p99 ms, CPU ms per request" for peer in peers]
    print_table("ours and its peers", [*columns, *names], rows)
    rows = [[*words, *(ratio(ours, name, load) for name in others)] for load, words in loads]
    print_table("requests/s of ours ÷ a peer's: median of each round's ratio", [*columns, *others], rows)
    rows = []
    for name, ((clients, batch), (bar, aim)) in itertools.product(others, BARS.items()):
        load = Load(clients, settings.tokens[0], batch)
        if {(name, load), (ours, load)} <= measured.results.keys():
            value = measured.ratio((ours, load), "requests_per_s", (name, load))
            cells = Aim(row=f"{name}: {load}", at_least=bar, aim=aim).cells(value)
            rows.append([*cells, cpu_ms(ours, load), cpu_ms(name, load)])
    spent = ["CPU ms per request, all processes: ours", "the peer's"]
    print_table("requests/s of ours ÷ a peer's; the bars are for vLLM on CPU", ["", *COLUMNS, *spent], rows)


def draw(peers: list[Peer], measured: Rounds[tuple[str, Load]], settings: Settings) -> None:
    """Plot tokens/s and the median latency of every load."""
    figure, axes = open_figure(2)
    loads = settings.loads
    figure.set_size_inches(15, 1.5 + 0.22 * len(loads) * len(peers))
    height = 0.8 / len(peers)
    for number, peer in enumerate(peers):
        done = [(place, load) for place, load in enumerate(loads) if (peer.name, load) in measured.results]
        at = [place + height * number for place, _ in done]
        rates = [measured.median((peer.name, load), "requests_per_s") * load.batch * load.tokens for _, load in done]
        latencies = [measured.median((peer.name, load), "p50_ms") for _, load in done]
        for axis, values in zip(axes, (rates, latencies), strict=True):
            axis.barh(at, values, height=0.9 * height, label=peer.name)
    for axis, title in zip(axes, ("Tokens per second", "Median latency, ms"), strict=True):
        axis.set_yticks([place + height * (len(peers) - 1) / 2 for place in range(len(loads))], map(str, loads))
        axis.invert_yaxis()
        axis.set_title(title)
    axes[1].set(xscale="log")
    axes[1].legend(frameon=False)
    write_figure(figure, settings.output_dir, settings.result)


async def run(settings: Settings) -> None:
    """Check the answers, measure, report."""
    report = Report(settings.result, settings)
    most = max(settings.batches)
    making, name = Texts(settings.model), name_of(settings.model)
    texts = {tokens: making.make(max(TEXTS, 2 * most), tokens) for tokens in sorted({*settings.tokens})}
    flags = shlex.split(settings.server_flags)
    ours = OURS.with_flags(OURS.name, *LONG_TEXTS, *PATIENT, *flags)
    theirs = [Peer.parse(text, name) for text in settings.peer]
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(open_variants([attrs.evolve(ours, model=settings.model)]))
        peers = [Peer(server.name, server.url, name) for server in servers.values()] + theirs
        least = {peer.name: least_cosine_of(flags if peer.name == ours.name else ()) for peer in peers}
        cosines = {peer.name: await check(peer, texts, settings.model, least[peer.name]) for peer in peers}
        measured = await measure(peers, texts, settings)
    show(peers, measured, settings)
    report.write(
        settings={"model": name},
        peers=[attrs.asdict(peer) for peer in peers],
        least_cosine_with_float32=cosines,
        loads=[
            {"server": name, **attrs.asdict(load), "rounds": [attrs.asdict(result) for result in results]}
            for (name, load), results in measured.results.items()
        ],
    )
    draw(peers, measured, settings)


main = command_of(run)


if __name__ == "__main__":
    cyclopts.run(main)
