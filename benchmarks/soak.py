"""Does a server stay as it is while it serves mixed traffic for long? Memory, descriptors, threads and tasks over time.

Texts of all lengths, batches, images, refused requests, clients that leave (``mixed_requests.py``), from closed-loop
clients. Everything that could leak is sampled every few seconds, and a line is fitted to what was seen after the first
quarter: how much there would be more after an hour. Something grows if that is more than a twentieth of it, and if it
has risen by more than it goes up and down anyway: trio's threads end when they are idle for ten seconds.

    python -m benchmarks.soak --minutes 30
"""

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import cyclopts
import numpy as np
import psutil
import trio
from attrs import define, field, frozen
from cyclopts import Parameter

from benchmarks.made_models import IMAGES, make_models
from benchmarks.memory import memory_of
from benchmarks.mixed_requests import MixedRequest, mixed_request, send_all
from benchmarks.model import MODEL_NAME, MODEL_PATH, Texts
from benchmarks.report import RESULTS, Flags, Report, command_of, open_figure, open_progress, print_table, write_figure
from benchmarks.scenarios import jpeg_url
from benchmarks.server_state import total_of, wait_idle
from benchmarks.servers import Server, open_server
from benchmarks.thread_clocks import process_tree

IMAGE_EVERY = 10
"""Every N-th request has an image."""

PICTURES = 32

MAX_REQUEST_TOKENS = 2048

MOST_PER_HOUR = {"PSS, MiB": 0.05, "RSS, MiB": 0.05, "descriptors": 0.05, "threads": 0.05, "tasks": 0.05}
"""Growth per hour, as a share of the level, past which a quantity may be said to grow."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings: ``minutes`` of traffic of ``clients``, sampled ``every_s``; ``flags`` are the server's.

    By default requests may wait long enough that none is refused, however slow the machine is at times.
    """

    rounds: int = 1
    minutes: float = 30.0
    every_s: float = 5.0
    clients: int = 8
    flags: Flags = (
        "--max-queue-s",
        "60",
    )
    output_dir: Path = RESULTS


@frozen
class Sample:
    """The resources of a server's processes ``at_s`` seconds after the beginning, with ``requests`` sent by then."""

    at_s: float
    requests: int
    values: dict[str, float]


@frozen
class Trend:
    """A line through what a quantity was: its growth ``per_hour``, its mean, and the standard deviation around it."""

    per_hour: float
    level: float
    scatter: float
    grows: bool


@define
class Soak:
    """One server over time."""

    samples: list[Sample] = field(factory=list)
    settled: bool = False
    """Whether nothing was left to do afterwards."""
    failed: list[str] = field(factory=list)
    """Answers that were not those expected."""

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Return the hours and the values of one quantity."""
        return [sample.at_s / 3600 for sample in self.samples], [sample.values[name] for sample in self.samples]

    def trend(self, name: str) -> "Trend":
        """Return how a quantity has changed after the first quarter."""
        hours, values = (np.array(numbers[len(self.samples) // 4 :]) for numbers in self.series(name))
        if len(values) < 2:
            return Trend(0.0, float(values[-1]), 0.0, grows=False)
        line = np.polyfit(hours, values, 1)
        per_hour, level = float(line[0]), float(values.mean())
        scatter = float(np.std(values - np.polyval(line, hours)))
        rise = per_hour * float(hours[-1] - hours[0])
        return Trend(per_hour, level, scatter, grows=per_hour > MOST_PER_HOUR[name] * level and rise > scatter)


async def take_sample(server: Server, at_s: float, requests: int) -> Sample:
    """Return what the server has now. Cancellation: at once."""
    memory = memory_of(server.pid)
    descriptors = threads = 0
    for pid in process_tree(server.pid):
        with suppress(psutil.Error, FileNotFoundError):
            process = psutil.Process(pid)
            descriptors += process.num_fds()
            threads += process.num_threads()
    values = {
        "PSS, MiB": sum(process.pss_mib for process in memory),
        "RSS, MiB": sum(process.rss_mib for process in memory),
        "descriptors": descriptors,
        "threads": threads,
        "tasks": await total_of(server, "trio_pool_serve_tasks"),
    }
    return Sample(at_s, requests, values)


def image_request(number: int, pictures: Sequence[str]) -> MixedRequest:
    """Return a request with an image; most of them are in the cache of the server."""
    body = {"model": IMAGES, "input": [pictures[number % len(pictures)]], "modality": "image"}
    return MixedRequest("/v1/embeddings", json.dumps(body).encode())


async def measure(server: Server, settings: Settings, words: list[str], pictures: Sequence[str]) -> Soak:
    """Keep the server busy and watch it. Cancellation: at once."""
    soak = Soak()
    sent = 0
    began = time.monotonic()
    end = began + 60 * settings.minutes

    def requests() -> Iterator[MixedRequest]:
        nonlocal sent
        while time.monotonic() < end:
            sent += 1
            if sent % IMAGE_EVERY == 0:
                yield image_request(sent, pictures)
            else:
                yield mixed_request(words, sent, MAX_REQUEST_TOKENS)

    def note(error: Exception) -> None:  # the soak continues, and reports it
        soak.failed.append(f"{type(error).__name__}: {error}"[:200])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_all, server.url, requests(), settings.clients, note)
        with open_progress() as progress:
            task = progress.add_task("soak", total=round(60 * settings.minutes))
            while (now := time.monotonic()) < end:
                soak.samples.append(await take_sample(server, now - began, sent))
                memory = soak.samples[-1].values["PSS, MiB"]
                progress.update(task, completed=now - began, description=f"{sent} requests, {memory:.0f} MiB")
                await trio.sleep(settings.every_s)
    soak.settled = await wait_idle(server)
    return soak


def show(soaks: Sequence[Soak], settings: Settings) -> None:
    """Print the table."""
    rows = []
    for soak in soaks:
        for name in MOST_PER_HOUR:
            _, values = soak.series(name)
            trend = soak.trend(name)
            numbers = [f"{value:.0f}" for value in (values[0], trend.level, max(values), values[-1])]
            growth = [f"{trend.per_hour:+.1f}", f"{trend.per_hour / trend.level:+.1%}"]
            rows.append([name, *numbers, f"{trend.scatter:.1f}", *growth, "**grows**" if trend.grows else "no"])
    requests = sum(soak.samples[-1].requests for soak in soaks)
    title = f"{settings.minutes:g} minutes, {requests} requests, {settings.clients} clients"
    after = ["mean after a quarter", "most", "at last", "goes up and down by", "per hour", "share", "grows"]
    columns = ["all processes", "at first", *after]
    print_table(title, columns, rows)
    ended = [
        ["answers that were not those expected", str(sum(len(soak.failed) for soak in soaks))],
        ["nothing is left to do afterwards", "yes" if all(soak.settled for soak in soaks) else "**no**"],
    ]
    print_table("In the end", ["what", "was"], ended)
    for failure in sorted({failure for soak in soaks for failure in soak.failed})[:10]:
        print(failure)


def draw(soak: Soak, settings: Settings) -> None:
    """Plot everything over time."""
    figure, axes = open_figure(len(MOST_PER_HOUR) - 1)
    hours, resident = soak.series("RSS, MiB")
    axes[0].plot([60 * hour for hour in hours], resident, label="resident")
    for axis, name in zip(axes, [name for name in MOST_PER_HOUR if name != "RSS, MiB"], strict=True):
        hours, values = soak.series(name)
        axis.plot([60 * hour for hour in hours], values, label="proportional" if "PSS" in name else name)
        axis.set(title="Memory, MiB" if "PSS" in name else name.capitalize(), xlabel="minutes", ylim=(0, None))
    axes[0].legend(frameon=False)
    write_figure(figure, settings.output_dir, "soak")


def write_long_model(folder: Path) -> Path:
    """Write the packaged model with the limit that it can read, 512 tokens: ``--max-model-len`` is for all models."""
    shutil.copytree(MODEL_PATH, folder)  # links that lead out of a model's folder are refused
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512, "do_lower_case": False}))
    return folder


async def run(settings: Settings) -> None:
    """Measure and report. Cancellation: at once; servers are stopped."""
    report = Report("soak", settings)
    words = Texts().words
    pictures = [jpeg_url(number, (256, 256)) for number in range(PICTURES)]
    soaks: list[Soak] = []
    with tempfile.TemporaryDirectory() as folder:
        images = make_models(Path(folder))[IMAGES]
        models = [f"{MODEL_NAME}={write_long_model(Path(folder) / MODEL_NAME)}", f"{IMAGES}={images}"]
        for _ in range(settings.rounds):
            command = ["trio_pool_serve", "serve", *models, *settings.flags]
            async with open_server("ours", command, ready_path="/readyz") as server:
                soaks.append(await measure(server, settings, words, pictures))
    show(soaks, settings)
    servers: list[dict[str, Any]] = [
        {"per_hour": {name: soak.trend(name).per_hour for name in MOST_PER_HOUR}, **attrs.asdict(soak)}
        for soak in soaks
    ]
    report.write(servers=servers)
    draw(soaks[-1], settings)


main = command_of(run)


if __name__ == "__main__":
    cyclopts.run(main)
