"""Short loads of servers: compiled or not, other checkouts, how many engines share the GPU, larger models.

Servers that are compared are ready at the same time and loaded in turns.
"""

import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

import attrs
import trio
from attrs import frozen

from benchmarks.aim import Aim
from benchmarks.bert_shapes import LARGER, write_larger
from benchmarks.gpu import server_load
from benchmarks.gpu.busy_share import BusyShare, watch
from benchmarks.gpu.contender import Contender, open_contenders
from benchmarks.gpu.loaded_runner import graph_shapes, runner_arguments
from benchmarks.gpu.mps import open_mps
from benchmarks.gpu.part import Findings, Part, Subject
from benchmarks.gpu.server_load import Measured, ServerLoad
from benchmarks.offline import open_offline
from benchmarks.servers import Server

SECONDS = 2.0
"""Of a load, after ``server_load.RAMP_S``."""

SETTLE_S = 20.0
"""How long servers are waited for after they are ready: the compiled code is in the cache since ``COMPILING``."""

COMPILED_WITHIN_S = 60.0

CORES = f"{len(os.sched_getaffinity(0))} cores for server and clients"


def load_of(tokens: int, texts: int, clients: int, at_least: float | None = None) -> ServerLoad:
    """Return a load; its rate is in tokens, or in requests if each has one short text, which takes mostly CPU time."""
    counts_tokens = tokens * texts > 50
    unit = "tokens/s" if counts_tokens else "requests/s"
    row = f"{unit}: {tokens} tokens × {texts} a request, {clients} clients"
    return ServerLoad(
        aim=Aim(row=row, at_least=at_least),
        tokens=tokens,
        clients=clients,
        texts=texts,
        counts_tokens=counts_tokens,
        note="" if counts_tokens else CORES,
    )


FULL, LONG = load_of(50, 64, 1024, 2.5e6), load_of(512, 1, 256, 1.6e6)

ALL = (FULL, load_of(50, 16, 1024, 2.0e6), load_of(50, 1, 1024, 12_000), LONG)

WITHOUT_BARS = tuple(load_of(load.tokens, load.texts, load.clients) for load in (FULL, LONG))

ALONE = attrs.evolve(server_load.ALONE, aim=attrs.evolve(server_load.ADDED, at_most=1.0))


@frozen(kw_only=True)
class ShortLoads:
    """The loads of servers that are compared with the first of them."""

    contenders: tuple[Contender, ...]
    loads: tuple[ServerLoad, ...]
    model: str = ""
    """One of ``LARGER``; BERT by default."""
    turns: int = 1
    alone: ServerLoad | None = None
    """Of the last server."""

    def part(self, name: str, budget_s: float) -> Part:
        """Return the part that runs the loads."""
        aims = [aim for one in self.contenders for aim in self._aims_of(one)]
        return Part(name=name, budget_s=budget_s, run=self.run, aims=[*aims, *([self.alone.aim] if self.alone else [])])

    def _aims_of(self, one: Contender) -> list[Aim]:
        base = self.contenders[0]
        ratios = [one.ratio(base, load) for load in self.loads if one is not base]
        return [one.cosine, *(one.of(load).aim for load in self.loads), *ratios]

    async def run(self, subject: Subject, findings: Findings) -> None:
        """Start the servers, check their answers, load them in turns. Cancellation: everything is stopped.

        A server whose flags this version does not have is left out. Rows that were measured before a failure stay.
        """
        contenders = [one for one in self.contenders if not self._is_refused(one, findings)]
        loads = [server_load.scaled(load, subject) for load in self.loads]
        model = await write_model(self.model, subject)
        measured = Measured(shapes=graph_shapes(model, subject.settings))
        try:
            async with AsyncExitStack() as stack:
                several = any(one.engines > 1 for one in contenders)
                variables = await stack.enter_async_context(open_mps(subject, findings)) if several else {}
                served = [(one, model) for one in contenders]
                servers = await open_contenders(stack, served, variables, subject, findings, SETTLE_S)
                # Of larger models, float32 takes seconds on CPU: only short texts.
                lengths = sorted({load.tokens for load in self.loads})[: 1 if self.model else None]
                for one, server in servers.items():
                    subject.note_step(f"checking answers: {one.name}")
                    findings.measured(one.cosine, await server_load.check(server, model, lengths))
                busy = await stack.enter_async_context(watch(subject.gpu))
                await self._measure(servers, loads, model, busy, measured, subject)
                if busy.problem:
                    findings.texts.append(f"The GPU's busy share was not measured: {busy.problem}.")
        finally:
            everything = [one.of(load) for load in loads for one in contenders]
            server_load.judge(everything, measured, findings, self.alone)
            _compare(contenders, loads, measured, findings)

    def _is_refused(self, one: Contender, findings: Findings) -> bool:
        if one.refusal is not None:
            for aim in self._aims_of(one):
                findings.not_measured(aim, one.refusal)
        return one.refusal is not None

    async def _measure(
        self,
        servers: dict[Contender, Server],
        loads: Sequence[ServerLoad],
        model: Path,
        busy: BusyShare,
        measured: Measured,
        subject: Subject,
    ) -> None:
        seconds = min(SECONDS, subject.settings.seconds)
        order = list(servers.items())
        for load in loads:
            for _ in range(self.turns):
                for one, server in order:
                    job = server_load.load_job(server, load, str(model), seconds)
                    await server_load.measure_load(one.of(load), job, busy, measured, subject)
                order.reverse()
        if self.alone is not None:
            *_, server = servers.values()
            job = server_load.load_job(server, self.alone, str(model), seconds)
            async with open_offline(*runner_arguments(model, subject.settings)) as offline:
                await server_load.measure_alone(self.alone, job, offline, measured, subject)


def _compare(
    contenders: Sequence[Contender], loads: Sequence[ServerLoad], measured: Measured, findings: Findings
) -> None:
    for one in contenders[1:]:
        for load in loads:
            theirs, ours = (measured.results.get(each.of(load).aim, []) for each in (contenders[0], one))
            ratios = [mine.requests_per_s / other.requests_per_s for mine, other in zip(ours, theirs, strict=False)]
            if ratios:
                findings.measured(one.ratio(contenders[0], load), median(ratios), f"{len(ratios)} in turns")


async def write_model(name: str, subject: Subject) -> Path:
    """Return the folder of a model of ``LARGER``, which is written if it is not there; without a name, that of BERT."""
    folder = subject.bert.with_name(name) if name else subject.bert
    if not folder.exists():
        subject.note_step(f"writing {name}")
        await trio.to_thread.run_sync(write_larger, folder, name, subject.settings.shape)
    return folder


async def compile_all(subject: Subject, findings: Findings) -> None:
    """Start a server for each model, until all have compiled code: later servers find it in the cache.

    Cancellation: the servers are stopped.
    """
    models = [(Contender(name=name or "bert"), await write_model(name, subject)) for name in ("", *LARGER)]
    try:
        async with AsyncExitStack() as stack:
            await open_contenders(stack, models, {}, subject, findings, COMPILED_WITHIN_S)
    finally:
        for name, after_s in findings.details.get("settled_after_s", {}).items():
            findings.measured(_compiled_after(name), after_s, "all models at the same time")


def _compiled_after(name: str) -> Aim:
    return Aim(row=f"{name}: s from the start until compiled code is loaded, empty cache")


COMPILING = Part(
    name="compiling", budget_s=75, run=compile_all, aims=[_compiled_after(name) for name in ("bert", *LARGER)]
)

EAGER = Contender(name="1 engine, eager", environment=(("TORCHDYNAMO_DISABLE", "1"),))


def one_engine_part(*, against: bool) -> Part:
    """Return the part for one engine: with the other checkout, without compiled code, and with it."""
    other = [Contender(name="the other checkout", is_other=True)] if against else []
    contenders = (*other, EAGER, Contender(name="1 engine"))
    return ShortLoads(contenders=contenders, loads=ALL, alone=ALONE).part("engines-1", 115 if against else 95)


def engines_part(count: int, budget_s: float) -> Part:
    """Return the part for several engines on one GPU."""
    contender = Contender(name=f"{count} engines", engines=count)
    return ShortLoads(contenders=(contender,), loads=ALL).part(f"engines-{count}", budget_s)


def larger_part(name: str, budget_s: float) -> Part:
    """Return the part for a model of ``LARGER``."""
    return ShortLoads(contenders=(Contender(name=name),), loads=WITHOUT_BARS, model=name).part(name, budget_s)


SEVERAL_ENGINES = (engines_part(8, 60), engines_part(4, 50), engines_part(2, 45))

LARGER_PARTS = tuple(larger_part(name, 45) for name in LARGER)
