"""Short loads of servers: how many engines share the GPU, other checkouts, other flags, larger models.

Servers that are compared are ready at the same time and loaded in turns.
"""

import os
import shlex
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
from benchmarks.gpu.loaded_runner import graph_shapes, runner_arguments
from benchmarks.gpu.mps import open_mps
from benchmarks.gpu.part import Findings, Part, Subject
from benchmarks.gpu.server_load import Measured, ServerLoad
from benchmarks.model import LEAST_COSINE
from benchmarks.offline import open_offline
from benchmarks.servers import ROOT, Server, free_port, module_command, open_process, wait_for_ok
from benchmarks.variants import refusal_of

SECONDS = 2.0
"""Of a load, after ``server_load.RAMP_S``."""

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
class Contender:
    """A server that is loaded. Its flags replace the benchmark's own."""

    name: str
    flags: tuple[str, ...] = ()
    engines: int = 0
    """How many share the GPU; by default, as many as without the flag."""
    is_other: bool = False
    """Whether it is that of the other checkout, ``Settings.against``."""

    def of(self, load: ServerLoad) -> ServerLoad:
        """Return a load of this server, with a row of its own."""
        return attrs.evolve(load, server=self.name, aim=attrs.evolve(load.aim, row=f"{self.name}: {load.aim.row}"))

    @property
    def cosine(self) -> Aim:
        """The row of its vectors."""
        return Aim(row=f"{self.name}: least cosine with float32", at_least=LEAST_COSINE)

    def ratio(self, base: "Contender", load: ServerLoad) -> Aim:
        """Return the row of its rate divided by that of another server."""
        return Aim(row=f"{self.name} ÷ {base.name}: {load.aim.row}")

    def command(self, model: Path, subject: Subject, port: int) -> list[str]:
        """Return the command that serves a model."""
        settings, flags = subject.settings, [*self.flags]
        if self.engines:
            flags += ["--replicas", str(min(self.engines, 2)) if settings.on_cpu else f"{self.engines}/gpu"]
        settings = attrs.evolve(settings, flags=f"{settings.flags} {shlex.join(flags)}")
        return module_command(["trio_pool_serve", "serve", str(model), *settings.server_flags()], port)


@frozen(kw_only=True)
class ShortLoads:
    """The loads of servers that are compared with the first of them."""

    contenders: tuple[Contender, ...]
    loads: tuple[ServerLoad, ...]
    model: str = ""
    """One of ``LARGER``; BERT by default."""
    turns: int = 1
    alone: ServerLoad | None = None

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
        model = await self._write_model(subject)
        measured = Measured(shapes=graph_shapes(model, subject.settings))
        try:
            async with AsyncExitStack() as stack:
                several = any(one.engines > 1 for one in contenders)
                variables = await stack.enter_async_context(open_mps(subject, findings)) if several else {}
                servers = await _open_servers(stack, contenders, model, variables, subject, findings)
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
        reason = refusal_of(one.flags)
        if reason is not None:
            for aim in self._aims_of(one):
                findings.not_measured(aim, reason)
        return reason is not None

    async def _write_model(self, subject: Subject) -> Path:
        if not self.model:
            return subject.bert
        subject.note_step("writing the model")
        folder = subject.bert.with_name(self.model)
        return await trio.to_thread.run_sync(write_larger, folder, self.model, subject.settings.shape)

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
            (server,) = servers.values()
            job = server_load.load_job(server, self.alone, str(model), seconds)
            async with open_offline(*runner_arguments(model, subject.settings)) as offline:
                await server_load.measure_alone(self.alone, job, offline, measured, subject)


async def _open_servers(
    stack: AsyncExitStack,
    contenders: Sequence[Contender],
    model: Path,
    variables: dict[str, str],
    subject: Subject,
    findings: Findings,
) -> dict[Contender, Server]:
    """Start all servers together, and wait until they are ready."""
    servers = {}
    began = trio.current_time()
    for one in contenders:
        folder = (subject.settings.against or ROOT).resolve() if one.is_other else ROOT
        port = free_port()
        command = one.command(model, subject, port)
        environment = {**variables, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
        opened = open_process(one.name, command, port, cwd=folder, environment=environment)
        servers[one] = await stack.enter_async_context(opened)
        findings.texts.append(f"{one.name}: `{' '.join(command[2:-2]).replace(str(model), model.name)}`")
    for one, server in servers.items():
        subject.note_step(f"starting: {one.name}")
        await wait_for_ok(f"{server.url}/readyz")
        findings.details.setdefault("ready_after_s", {})[one.name] = trio.current_time() - began
    return servers


def _compare(
    contenders: Sequence[Contender], loads: Sequence[ServerLoad], measured: Measured, findings: Findings
) -> None:
    for one in contenders[1:]:
        for load in loads:
            theirs, ours = (measured.results.get(each.of(load).aim, []) for each in (contenders[0], one))
            ratios = [mine.requests_per_s / other.requests_per_s for mine, other in zip(ours, theirs, strict=False)]
            if ratios:
                findings.measured(one.ratio(contenders[0], load), median(ratios), f"{len(ratios)} in turns")


def engines_part(count: int, budget_s: float) -> Part:
    """Return the part for some engines on one GPU."""
    name = f"{count} engine{'s' * (count > 1)}"
    loads = ShortLoads(
        contenders=(Contender(name=name, engines=count),), loads=ALL, alone=ALONE if count == 1 else None
    )
    return loads.part(f"engines-{count}", budget_s)


AGAINST = ShortLoads(
    contenders=(Contender(name="the other checkout", is_other=True), Contender(name="this checkout")),
    loads=ALL,
    turns=2,
).part("against", 110)

COMPILED = ShortLoads(
    contenders=(
        Contender(name="eager", flags=("--compile", "never")),
        Contender(name="compiled", flags=("--compile", "before-start")),
    ),
    loads=(FULL, LONG),
).part("compiled", 100)


def larger_part(name: str, budget_s: float) -> Part:
    """Return the part for a model of ``LARGER``."""
    return ShortLoads(contenders=(Contender(name=name),), loads=WITHOUT_BARS, model=name).part(name, budget_s)


PARTS = (
    engines_part(1, 65),
    AGAINST,
    engines_part(8, 50),
    engines_part(4, 45),
    engines_part(2, 45),
    COMPILED,
)

LARGER_PARTS = tuple(larger_part(name, 45) for name in LARGER)
