"""Snapshots of the metrics and load of all processes of one server.

Each process listens on its own socket in a shared folder. The process that answers ``/metrics`` or ``/load`` fetches
the others' snapshots.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import trio
from attrs import define
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from trio_pool_serve.processes.allocator import resident_bytes
from trio_pool_serve.processes.framed_stream import FramedStream
from trio_pool_serve.processes.socket_folder import serve_at
from trio_pool_serve.telemetry.gauges import GAUGES
from trio_pool_serve.telemetry.metrics import PREFIX

logger = logging.getLogger(__name__)

TIMEOUT_S = 1.0
"""A process that has not answered after this many seconds is left out."""

MAXIMA = ("oldest_in_flight_seconds", "oldest_in_flight_s", "waiting_seconds")
"""Merged by the maximum over all processes; names neither here nor in ``MINIMA`` are summed."""

MINIMA = ("batch_token_budget", "start_time_seconds")
"""Merged by the minimum."""

SUFFIX = ".telemetry"

STATES = ("dead", "failed", "loading", "stalled", "unloaded", "ready")
"""The worst first; only replicas can be ``failed``."""

OF_REPLICA = {f"{PREFIX}{name}": f"{PREFIX}{of_replica}" for name, of_replica in (
    ("engine", "replica"), ("tokens", "replica_tokens"), ("faults", "replica_faults"),
)}  # fmt: skip
"""Metrics of an engine process, and the names under which they are exported again for each replica."""


class Family(msgspec.Struct, array_like=True):
    """One metric of one process; a sample has a name, labels and a value."""

    name: str
    help: str
    type: str
    samples: list[tuple[str, dict[str, str], float]]


class Snapshot(msgspec.Struct, array_like=True, tag=True):
    """The current metrics of one process, and its part of ``/load``."""

    families: list[Family]
    load: dict[str, Any]


def families_of(registry: CollectorRegistry) -> list[Family]:
    """Return the current values of all metrics of a registry."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [(sample.name, sample.labels, sample.value) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


def gauge_family(name: str, samples: Iterable[tuple[dict[str, str], float]]) -> Family:
    """Return one of ``GAUGES`` with its samples, each with its labels."""
    full_name = PREFIX + name
    return Family(
        full_name, GAUGES[name].text, "gauge", [(full_name, labels, float(value)) for labels, value in samples]
    )


def families_of_replica(families: Iterable[Family], labels: Mapping[str, str]) -> list[Family]:
    """Return the metrics of ``OF_REPLICA`` with the labels of one replica, which are not summed over replicas."""
    return [
        Family(
            OF_REPLICA[family.name],
            f"{family.help}; of each replica",
            family.type,
            [
                (OF_REPLICA[family.name] + name.removeprefix(family.name), {**known, **labels}, value)
                for name, known, value in family.samples
            ],
        )
        for family in families
        if family.name in OF_REPLICA
    ]


def process_usage() -> dict[str, float]:
    """Return this process's id, resident memory in bytes, and seconds of CPU time since its start."""
    return {"pid": os.getpid(), "memory_bytes": resident_bytes(), "cpu_seconds": time.process_time()}


def api_process_name(number: int) -> str:
    """Return the name of an API process in ``/load``."""
    return f"api {number}"


def engine_process_name(model: str, replica: str) -> str:
    """Return the name of an engine process in ``/load``."""
    return f"engine {model} {replica}"


def own_socket(folder: Path) -> Path:
    """Return the path of this process's socket."""
    return folder / f"{os.getpid()}{SUFFIX}"


async def serve_snapshots(folder: Path, take: Callable[[], Snapshot]) -> None:
    """Send the snapshot that ``take()`` returns to each process that connects, forever.

    Raises ``ModelLoadError`` if the socket cannot be bound. Cancellation: at once.
    """

    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            try:
                await FramedStream(stream, Snapshot).send(take())
            except trio.BrokenResourceError:
                return  # the other process no longer waits
            except Exception:
                logger.exception("a snapshot cannot be sent to another process")

    await serve_at(own_socket(folder), partial(trio.serve_listeners, answer))


async def gather_snapshots(folder: Path) -> list[Snapshot]:
    """Return the snapshots of the other processes in ``folder`` that answer in time. Cancellation: at once."""
    found: list[Snapshot] = []

    async def request(path: Path) -> None:
        with trio.move_on_after(TIMEOUT_S), suppress(OSError):
            try:
                async with await trio.open_unix_socket(path) as stream:
                    if (received := await FramedStream[Snapshot](stream, Snapshot).receive()) is not None:
                        found.append(received[0])
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)  # noqa: ASYNC240  (the process has died)

    async with trio.open_nursery() as nursery:
        for path in sorted(folder.glob(f"*{SUFFIX}")):  # noqa: ASYNC240  (a handful of files, in memory)
            if path != own_socket(folder):
                nursery.start_soon(request, path)
    return found


@define(eq=False)
class _Merged:
    """The merged metrics of several processes, with the interface of a ``CollectorRegistry``."""

    snapshots: Sequence[Snapshot]

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, tuple[Family, dict[tuple[str, tuple[tuple[str, str], ...]], float]]] = {}
        for snapshot in self.snapshots:
            for family in snapshot.families:
                _, values = merged.setdefault(family.name, (family, {}))
                for name, labels, value in family.samples:
                    key = name, tuple(labels.items())
                    values[key] = _merged_value(labels.get("of", name), values.get(key), value)
        for family, values in merged.values():
            metric = Metric(family.name, family.help, family.type)
            for (name, pairs), value in values.items():
                metric.add_sample(name, dict(pairs), value)
            yield metric


def _merged_value(name: str, known: float | None, value: float) -> float:
    if known is None:
        return value
    if name.endswith("_created") or name in MINIMA:
        return min(known, value)
    return max(known, value) if name in MAXIMA else known + value


def exposition_of(snapshots: Sequence[Snapshot]) -> bytes:
    """Return the metrics of all processes in the Prometheus text format; callable in any thread."""
    return generate_latest(_Merged(snapshots))


def merged_load(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """Return ``/load`` over all processes: numbers are merged as metrics, states by the worst."""
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
            into[name] = _merged_value(name, known, value)
