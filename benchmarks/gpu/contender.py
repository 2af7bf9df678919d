"""Servers that are compared: started together, and waited for until nothing about how they compute changes any more."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import attrs
import trio
from attrs import frozen

from benchmarks.aim import Aim
from benchmarks.gpu.part import Findings, Subject
from benchmarks.gpu.server_load import ServerLoad
from benchmarks.model import LEAST_COSINE
from benchmarks.servers import ROOT, Server, free_port, module_command, open_process, wait_for_ok
from benchmarks.variants import refusal_of

SETTLED = re.compile(r"compiled code computes from now on, [\d.]+ s after|the model could not be compiled: [^\"\n]*")
"""In the log of an engine process: what it was waited for."""

CODE = "trio_pool_serve/models/loading/compiled_code.py"
"""A checkout without this file compiles nothing."""


@frozen(kw_only=True)
class Contender:
    """A server that is loaded. Its flags replace the benchmark's own."""

    name: str
    flags: tuple[str, ...] = ()
    engines: int = 1
    environment: tuple[tuple[str, str], ...] = ()
    is_other: bool = False
    """Whether it is that of the other checkout, ``Settings.against``."""

    def of(self, load: ServerLoad) -> ServerLoad:
        """Return a load of this server, with a row of its own."""
        return attrs.evolve(load, server=self.name, aim=attrs.evolve(load.aim, row=f"{self.name}: {load.aim.row}"))

    @property
    def cosine(self) -> Aim:
        """The row of its vectors."""
        return Aim(row=f"{self.name}: least cosine with float32", at_least=LEAST_COSINE)

    @property
    def refusal(self) -> str | None:
        """Why this version of the server has not the flags; ``None`` if it has them."""
        return refusal_of(self.flags)

    def ratio(self, base: "Contender", load: ServerLoad) -> Aim:
        """Return the row of its rate divided by that of another server."""
        return Aim(row=f"{self.name} ÷ {base.name}: {load.aim.row}")

    def checkout(self, subject: Subject) -> Path:
        """Return the folder of its code."""
        return (subject.settings.against or ROOT).resolve() if self.is_other else ROOT

    def command(self, model: Path, subject: Subject, port: int) -> list[str]:
        """Return the command that serves a model. On CPU, it is compiled as on a GPU."""
        settings = subject.settings
        # A process that cannot compile is not to share what it keeps.
        flags = [
            *self.flags,
            "--cache-dir",
            str(subject.bert.with_name("cache-apart" if self.environment else "cache")),
        ]
        flags += ["--backend", "compile"] if settings.on_cpu else []
        if self.engines > 1 or settings.on_cpu:
            flags += ["--replicas", str(min(self.engines, 2)) if settings.on_cpu else f"{self.engines}/gpu"]
        settings = attrs.evolve(settings, flags=f"{settings.flags} {shlex.join(flags)}")
        return module_command(["trio_pool_serve", "serve", str(model), *settings.server_flags()], port)


async def open_contenders(
    stack: AsyncExitStack,
    contenders: Sequence[tuple[Contender, Path]],
    variables: Mapping[str, str],
    subject: Subject,
    findings: Findings,
    settle_s: float,
) -> dict[Contender, Server]:
    """Start servers with their models together, and wait until they are ready and compute by compiled code.

    They run until the ``stack`` is left. If one still changes after ``settle_s`` seconds, the page says so. The value
    of ``findings.details["settled_after_s"]`` has the others.
    """
    began, servers, logs = trio.current_time(), dict[Contender, Server](), dict[Contender, Path]()
    for one, model in contenders:
        folder, port = one.checkout(subject), free_port()
        command, logs[one] = one.command(model, subject, port), subject.bert.parent / f"{port}.log"
        environment = {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]), **variables}
        opened = open_process(
            one.name, command, port, cwd=folder, environment={**environment, **dict(one.environment)}, log=logs[one]
        )
        servers[one] = await stack.enter_async_context(opened)
        shown = " ".join([*(f"{name}={value}" for name, value in one.environment), *command[2:-2]])
        findings.texts.append(f"{one.name}: `{shown.replace(f'{subject.bert.parent}/', '')}`")
    for one, server in servers.items():
        subject.note_step(f"starting: {one.name}")
        await wait_for_ok(f"{server.url}/readyz")
        findings.details.setdefault("ready_after_s", {})[one.name] = trio.current_time() - began
    with trio.move_on_after(settle_s * subject.settings.time_factor):
        async with trio.open_nursery() as nursery:
            for one in servers:
                nursery.start_soon(_wait_settled, one, logs[one], began, subject, findings)
    for name in {one.name for one in servers} - findings.details.get("settled_after_s", {}).keys():
        findings.texts.append(f"{name}: **it may have changed over to compiled code while it was measured.**")
    return servers


def _messages(log: Path) -> list[str]:
    return SETTLED.findall(log.read_text(errors="replace"))


async def _wait_settled(one: Contender, log: Path, began: float, subject: Subject, findings: Findings) -> None:
    """Wait until each engine process has compiled code, or will have none."""
    engines = min(one.engines, 2) if subject.settings.on_cpu else one.engines
    found: list[str] = []
    while len(found) < engines and (one.checkout(subject) / CODE).exists():
        await trio.sleep(0.2)
        found = _messages(log)
    findings.details.setdefault("settled_after_s", {})[one.name] = trio.current_time() - began
    findings.texts += [f"{one.name}: {message}" for message in sorted(set(found))]
