"""Is what bulk work writes the same, however often it is killed, and is no row computed again that was committed.

Vectors to Parquet and to JSON lines, ``run-batch``, and a batch of a server: each once without interruption. Then it is
killed (SIGKILL) at random moments and started again, until it has ended; and again from the beginning, until there were
enough kills. After each kill what is there is compared with the first run's bytes; at the end all of it is, and where
the last process says that it began with what was committed then. Fails if anything differs.

    python -m benchmarks.interruptions
"""

import json
import random
import re
import signal
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import cyclopts
import httpx
import trio
from attrs import define, field, frozen
from cyclopts import Parameter

from benchmarks.beside_a_batch import BatchClient
from benchmarks.bulk import write_rows
from benchmarks.machine import describe_machine
from benchmarks.model import MODEL_NAME, MODEL_PATH
from benchmarks.report import RESULTS, open_progress, print_table, settings_document, write_json
from benchmarks.servers import READY_TIMEOUT_S, ROOT, Server, free_port, wait_for_ok

KINDS = ("parquet", "jsonl", "run-batch", "server")

ROWS_PER_FILE = "1024"
"""Each file is a commit: with the default, most kills would come before the first."""

SHARE = 8
"""A process is killed within this share of the time that computing everything takes; some before they compute."""


class DiffersError(Exception):
    """An interrupted run has lost, repeated or changed something."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """What is run: ``kills`` of runs over ``rows``, of ``only`` these kinds."""

    rounds: int = 1
    kills: int = 50
    rows: int = 20_000
    seed: int = 0
    only: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = KINDS
    output_dir: Path = RESULTS


@define
class Found:
    """What the kills of one kind have shown: none has, unless it is counted here, changed a byte."""

    kind: str
    uninterrupted_s: float = 0.0
    kills: int = 0
    kills_in_the_middle: int = 0
    """Those after which something was committed, and not all."""
    runs: int = 0
    committed: list[int] = field(factory=list)
    """Rows that were committed after each kill."""


def digests(target: Path) -> dict[str, str]:
    """Return the digest of each file of an output."""
    files = sorted(target.glob("part-*[!p]")) if target.is_dir() else [target]  # not those whose names end in .tmp
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in files}


def committed_rows(journal: Path) -> int:
    """Return how many rows a journal says are done; 0 before there is one."""
    if not journal.exists():
        return 0
    with closing(sqlite3.connect(journal)) as database:
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'run'").fetchone():
            return 0
        found = database.execute("SELECT value FROM run WHERE name = 'progress'").fetchone()
    return int(json.loads(found[0])["done"]) if found else 0


def check_prefix(target: Path, first: Path, kind: str) -> None:
    """Raise ``DiffersError`` if complete parts, or the lines that two files share, differ."""
    if target.is_dir():
        expected = digests(first)
        if any(expected[name] != digest for name, digest in digests(target).items()):
            raise DiffersError(f"{kind}: a part differs")
    elif target.exists():
        content = target.read_bytes()
        if not first.read_bytes().startswith(content[: content.rfind(b"\n") + 1]):
            raise DiffersError(f"{kind}: lines differ")


@define(eq=False)
class CommandRuns:
    """Runs a command that writes files, to its end or until it is killed."""

    kind: str
    folder: Path
    source: Path
    target: Path = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.begin("first")

    def begin(self, name: str) -> None:
        """Have the next process begin another output."""
        self.target = self.folder / (f"{name}.parquet" if self.kind == "parquet" else f"{name}.jsonl")

    @property
    def committed(self) -> int:
        """Rows that are committed."""
        return committed_rows(self.target.with_name(f"{self.target.name}.journal"))

    async def run(self, kill_after_s: float | None) -> str | None:
        """Return what a process says at its end, or ``None`` if it was killed."""
        arguments = (
            ["run-batch", "-i", str(self.source), "-o", str(self.target), "--served-model-name", MODEL_NAME]
            if self.kind == "run-batch"
            else ["embed", str(self.source), str(self.target), "--rows-per-file", ROWS_PER_FILE]
        )
        command = [sys.executable, "-m", "trio_pool_serve", *arguments, "--model", MODEL_PATH]
        async with trio.open_nursery() as nursery:
            start = partial(trio.run_process, command, cwd=ROOT, capture_stderr=True, check=False)
            results: list[Any] = []

            async def wait(*, task_status: trio.TaskStatus[trio.Process]) -> None:
                results.append(await start(task_status=task_status))

            process: trio.Process = await nursery.start(wait)
            if kill_after_s is not None:
                with trio.move_on_after(kill_after_s):
                    await process.wait()
                if process.poll() is None:
                    process.kill()
        if results[0].returncode == -signal.SIGKILL:
            return None
        said = results[0].stderr.decode()
        if results[0].returncode:
            raise DiffersError(f"{self.kind}: ended with {results[0].returncode}: {said[-2000:]}")
        return said


def rows_left_by(said: str, rows: int) -> int:
    """Return how many rows an earlier run had done, by what the last one says; ``rows`` if it had nothing to do."""
    if "is complete" in said:
        return rows
    found = re.search(r"\(([\d,]+) by an earlier run\)", said)
    return int(found[1].replace(",", "")) if found else 0


async def interrupt_command(found: Found, folder: Path, settings: Settings, advance: Callable[[], None]) -> None:
    """Kill a command and check what it leaves, until there were enough kills."""
    rng = random.Random(settings.seed)
    source = folder / ("requests.jsonl" if found.kind == "run-batch" else "rows.jsonl")
    runs = CommandRuns(found.kind, folder, source)
    began = time.monotonic()
    said = await runs.run(None)
    found.uninterrupted_s = time.monotonic() - began
    first = runs.target
    rate = float(re.findall(r"([\d,]+) rows/s", said or "")[-1].replace(",", ""))
    computing_s = settings.rows / rate
    starting_s = found.uninterrupted_s - computing_s
    while found.kills < settings.kills:
        found.runs += 1
        runs.begin(f"run-{found.runs}")
        committed = 0
        while True:
            more = found.kills < settings.kills
            said = await runs.run(starting_s + rng.uniform(-starting_s / 4, computing_s / SHARE) if more else None)
            before, committed = committed, await trio.to_thread.run_sync(lambda: runs.committed)
            if committed < before:
                raise DiffersError(f"{found.kind}: {before} rows were committed, and then {committed}")
            if said is not None:
                break
            found.kills += 1
            found.kills_in_the_middle += 0 < committed < settings.rows
            found.committed.append(committed)
            advance()
            await trio.to_thread.run_sync(check_prefix, runs.target, first, found.kind)
        if rows_left_by(said, settings.rows) != before:
            raise DiffersError(f"{found.kind}: {before} rows were committed, and the last process says: {said}")
        if list(digests(runs.target).values()) != list(digests(first).values()):
            raise DiffersError(f"{found.kind}: the output differs")


@asynccontextmanager
async def open_server(folder: Path) -> AsyncIterator[tuple[trio.Process, BatchClient]]:
    """Run a server that keeps its data in a folder; it is killed at the end of the block, if it was not before."""
    port = free_port()
    command = [sys.executable, "-m", "trio_pool_serve", "serve", f"{MODEL_NAME}={MODEL_PATH}"]
    command += ["--port", str(port), "--data-dir", str(folder / "data")]
    async with trio.open_nursery() as nursery:
        start = partial(trio.run_process, command, cwd=ROOT, capture_stdout=True, capture_stderr=True, check=False)
        process: trio.Process = await nursery.start(start)
        with trio.fail_after(READY_TIMEOUT_S):
            await wait_for_ok(f"http://127.0.0.1:{port}/readyz")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60.0) as client:
            yield process, BatchClient(Server("ours", port, process.pid), client)
        process.kill()


async def lines_of(client: httpx.AsyncClient) -> int:
    """Return how many lines of batches a server's process has computed."""
    return int((await client.get("/load")).raise_for_status().json()["batches"]["lines"])


async def wait_completed(client: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    """Return a batch once it has ended. Raises ``DiffersError`` unless all of it is completed."""
    while True:
        batch: dict[str, Any] = (await client.get(f"/v1/batches/{batch_id}")).raise_for_status().json()
        if batch["status"] == "completed" and batch["request_counts"]["failed"] == 0:
            return batch
        if batch["status"] not in ("validating", "in_progress", "finalizing"):
            raise DiffersError(f"server: {batch}")
        await trio.sleep(0.2)


async def interrupt_server(found: Found, folder: Path, settings: Settings, advance: Callable[[], None]) -> None:
    """Kill a server with a batch and check what it leaves, until there were enough kills."""
    rng = random.Random(settings.seed)
    async with open_server(folder) as (_, batches):
        await batches.upload([json.loads(line)["text"] for line in (folder / "rows.jsonl").read_text().splitlines()])
        began = time.monotonic()
        batch = await wait_completed(batches.client, await batches.create())
        found.uninterrupted_s = time.monotonic() - began
        first = await content_of(batches, batch)
    while found.kills < settings.kills:
        found.runs += 1
        batch_id = ""
        completed = 0
        while True:
            async with open_server(folder) as (process, again):
                again.file_id = batches.file_id
                batch_id = batch_id or await again.create()
                after_s = rng.uniform(0, found.uninterrupted_s / SHARE) if found.kills < settings.kills else None
                batch = {}
                with trio.move_on_after(float("inf") if after_s is None else after_s):
                    batch = await wait_completed(again.client, batch_id)
                if not batch:
                    process.kill()
                elif await lines_of(again.client) != settings.rows - completed:
                    raise DiffersError(
                        f"server: {completed} lines were committed, and the last process began elsewhere"
                    )
            committed = await trio.to_thread.run_sync(committed_lines, folder / "data", batch_id)
            if committed < completed:
                raise DiffersError(f"server: {completed} lines were committed, and then {committed}")
            if batch:
                break
            completed = committed
            found.kills += 1
            found.kills_in_the_middle += 0 < completed < settings.rows
            found.committed.append(completed)
            advance()
        async with open_server(folder) as (_, again):
            if await content_of(again, batch) != first:
                raise DiffersError("server: the output differs")


def committed_lines(data: Path, batch_id: str) -> int:
    """Return how many lines of a batch are committed in the database of a server that does not run."""
    with closing(sqlite3.connect(data / "batches.sqlite")) as database:
        (record,) = database.execute("SELECT record FROM batches WHERE id = ?", (batch_id,)).fetchone()
    return int(json.loads(record)["position"]["completed"])


async def content_of(batches: BatchClient, batch: dict[str, Any]) -> str:
    """Return the digest of a batch's output."""
    content = await batches.client.get(f"/v1/files/{batch['output_file_id']}/content")
    return sha256(content.raise_for_status().content).hexdigest()


def write_requests(source: Path, target: Path) -> None:
    """Write a file of requests, with a line for each row."""
    with target.open("w") as file:
        for line in source.read_text().splitlines():
            row = json.loads(line)
            body = {"model": MODEL_NAME, "input": row["text"]}
            request = {"custom_id": str(row["id"]), "method": "POST", "url": "/v1/embeddings", "body": body}
            file.write(json.dumps(request) + "\n")


async def run(settings: Settings) -> None:
    """Kill, check and report. Cancellation: at once; processes are killed."""
    machine: dict[str, Any] = describe_machine()
    all_found = [Found(kind) for kind in settings.only]
    for found in all_found:
        with TemporaryDirectory() as name, open_progress() as progress:
            folder = Path(name)
            await trio.to_thread.run_sync(write_rows, folder / "rows.jsonl", settings.rows)
            await trio.to_thread.run_sync(write_requests, folder / "rows.jsonl", folder / "requests.jsonl")
            task = progress.add_task(found.kind, total=settings.kills)
            interrupt = interrupt_server if found.kind == "server" else interrupt_command
            await interrupt(found, folder, settings, partial(progress.advance, task))
    rows = [
        [
            found.kind,
            f"{found.uninterrupted_s:.0f}",
            str(found.kills),
            str(found.kills_in_the_middle),
            str(found.runs),
            "identical",
            "none",
        ]
        for found in all_found
    ]
    columns = ["output", "uninterrupted, s", "kills", "in the middle", "runs", "bytes", "committed rows computed again"]
    print_table(f"Killed at random moments of {settings.rows:,} rows", columns, rows)
    document = {
        "machine": machine,
        "settings": settings_document(settings),
        "kinds": [{"kind": found.kind, "kills": found.kills, "committed": found.committed} for found in all_found],
    }
    write_json(settings.output_dir, "interruptions", document)


def main(settings: Settings = Settings()) -> None:
    """Kill runs of bulk work at random moments, and compare what they write."""
    trio.run(run, settings)


if __name__ == "__main__":
    cyclopts.run(main)
