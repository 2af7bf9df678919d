"""What all processes of one server have to tell, asked of any of them.

Each process listens on a socket of its own in a folder that they share; whoever is asked for ``/metrics`` or ``/load``
asks the others.
"""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import trio
from attrs import define
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from trio_pool_serve.processes.child_process import listening_at
from trio_pool_serve.processes.framed_stream import FramedStream

logger = logging.getLogger(__name__)

PATIENCE_S = 1.0
"""A process that has not answered by then is left out: what the others say is better than no answer."""

LARGEST = ("oldest_in_flight_seconds", "oldest_in_flight_s")
"""Of these the greatest counts over all processes, of everything else the sum."""

SUFFIX = ".telemetry"

STATES = ("dead", "loading", "ready")


class Family(msgspec.Struct, array_like=True):
    """One metric of one process; a sample is its name, labels and value."""

    name: str
    help: str
    type: str
    samples: list[tuple[str, dict[str, str], float]]


class Snapshot(msgspec.Struct, array_like=True, tag=True):
    """What one process has to tell now: its metrics, and its part of ``/load``."""

    families: list[Family]
    load: dict[str, Any]


def families_of(registry: CollectorRegistry) -> list[Family]:
    """Return all metrics of a registry, as they are now."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [(sample.name, sample.labels, sample.value) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


def own_socket(folder: Path) -> Path:
    """Return where this process listens."""
    return folder / f"{os.getpid()}{SUFFIX}"


async def serve_snapshots(folder: Path, take: Callable[[], Snapshot]) -> None:
    """Answer the other processes of ``folder`` with what ``take()`` returns, called on the loop; for ever.

    Raises ``ModelLoadError`` where there can be no socket. Cancellation: at once.
    """

    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            try:
                await FramedStream(stream, Snapshot).send(take())
            except trio.BrokenResourceError:
                return  # it has given up
            except Exception:
                logger.exception("another process cannot be sent what this one counts")

    with listening_at(own_socket(folder)) as listening:
        await trio.serve_listeners(answer, [trio.SocketListener(trio.socket.from_stdlib_socket(listening))])


async def gather_snapshots(folder: Path) -> list[Snapshot]:
    """Return what the other processes of ``folder`` say. Cancellation: at once."""
    found: list[Snapshot] = []

    async def ask(path: Path) -> None:
        with trio.move_on_after(PATIENCE_S):
            try:
                async with await trio.open_unix_socket(path) as stream:
                    received = await FramedStream[Snapshot](stream, Snapshot).receive()
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)  # noqa: ASYNC240  (the process has died)
                return
            except OSError:
                return
            if received is not None:
                found.append(received[0])

    async with trio.open_nursery() as nursery:
        for path in sorted(folder.glob(f"*{SUFFIX}")):  # noqa: ASYNC240  (a handful of files, in memory)
            if path != own_socket(folder):
                nursery.start_soon(ask, path)
    return found


@define(eq=False)
class _Merged:
    """The metrics of several processes, in the shape that the exposition is made from."""

    snapshots: Sequence[Snapshot]

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, tuple[Family, dict[tuple[str, tuple[tuple[str, str], ...]], float]]] = {}
        for snapshot in self.snapshots:
            for family in snapshot.families:
                _, values = merged.setdefault(family.name, (family, {}))
                for name, labels, value in family.samples:
                    key = name, tuple(labels.items())
                    values[key] = _joined(_of(name, labels), values.get(key), value)
        for family, values in merged.values():
            metric = Metric(family.name, family.help, family.type)
            for (name, pairs), value in values.items():
                metric.add_sample(name, dict(pairs), value)
            yield metric


def _of(name: str, labels: dict[str, str]) -> str:
    return labels.get("of", name)


def _joined(name: str, known: float | None, value: float) -> float:
    if known is None:
        return value
    if name.endswith("_created"):
        return min(known, value)
    return max(known, value) if name in LARGEST else known + value


def exposition_of(snapshots: Sequence[Snapshot]) -> bytes:
    """Return the metrics of all processes in the Prometheus text format; in any thread."""
    return generate_latest(_Merged(snapshots))


def merged_load(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """Return ``/load`` over all processes: numbers are added up, of states the worst counts."""
    merged: dict[str, Any] = {}
    for snapshot in snapshots:
        _merge(merged, snapshot.load)
    return merged


def _merge(into: dict[str, Any], load: dict[str, Any]) -> None:
    for name, value in load.items():
        known = into.get(name)
        if isinstance(value, dict):
            _merge(into.setdefault(name, {}), value)
        elif isinstance(value, str):
            into[name] = value if known is None else min(known, value, key=STATES.index)
        else:
            into[name] = _joined(name, known, value)
