"""Batches on a disk that fails, and files that someone removes; cancellation of everything behind the routes."""

import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path

import attrs
import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.conftest import running, until, wait_idle
from tests.runs.requests.line_files import ENDPOINT, cancelled_before, encoded, line, rows
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.access.api_keys import KeyUsage
from trio_pool_serve.app import create_app
from trio_pool_serve.config import BatchConfig, Config
from trio_pool_serve.errors import EngineLoadingError, QuotaExceededError
from trio_pool_serve.runs import run
from trio_pool_serve.runs.batch_api import batch_runner
from trio_pool_serve.runs.batch_api.batch_store import Page
from trio_pool_serve.runs.batch_api.open_batches import OpenBatches
from trio_pool_serve.runs.batch_api.stored_records import FINAL, StoredBatch, StoredFile, new_id
from trio_pool_serve.service import Service


@pytest.fixture
def config(scripted_folder: Path, tmp_path: Path) -> Config:
    return Config(models=(f"model={scripted_folder}",), batch=BatchConfig(data_dir=tmp_path / "data"))


@asynccontextmanager
async def opening(config: Config, scripted: ScriptedRunner) -> AsyncIterator[OpenBatches]:
    """Start a service, and open its data folder."""
    async with running(Service(config, lambda *_: scripted)) as service:
        create_app(config, service)
        yield await service.batches.locate(create=True)


@pytest.fixture
async def opened(service: Service) -> OpenBatches:
    create_app(service.config, service)
    return await service.batches.locate(create=True)


async def stored(batches: OpenBatches, content: bytes, owner: str = "") -> StoredFile:
    async with batches.receiving(owner) as upload:
        await batches.reserve(upload, len(content))
        upload.append([content])
        return await batches.complete(upload, filename="x", expire_s=None)


async def created(batches: OpenBatches, content: bytes, owner: str = "") -> StoredBatch:
    file = await stored(batches, content, owner)
    batch = StoredBatch(
        id=new_id("batch_"),
        owner=owner,
        endpoint=ENDPOINT,
        input_file_id=file.id,
        completion_window="24h",
        expires_at=int(batches.store.clock()) + 86400,
        output_id=new_id("file-"),
        error_id=new_id("file-"),
    )
    return await batches.add_batch(batch, idempotency_key=None, request=b"")


async def reached(batches: OpenBatches, batch: StoredBatch, condition) -> StoredBatch:
    with trio.fail_after(60):
        while not condition(found := await batches.store.batch(None, batch.id)):  # noqa: ASYNC110
            await trio.sleep(0.002)
    return found


async def in_progress(batches: OpenBatches, batch: StoredBatch) -> StoredBatch:
    return await reached(batches, batch, lambda found: found.status == "in_progress")


async def ended(batches: OpenBatches, batch: StoredBatch) -> StoredBatch:
    return await reached(batches, batch, lambda found: found.status in FINAL)


async def test_a_batch_waits_while_the_disk_is_full_and_goes_on(config, scripted, small_disk, monkeypatch, caplog):
    monkeypatch.setattr(batch_runner, "RETRY_PAUSE_S", 0.05)
    config = attrs.evolve(config, batch=attrs.evolve(config.batch, data_dir=small_disk / "data"))
    async with opening(config, scripted) as batches:
        scripted.gate.clear()
        batch = await in_progress(batches, await created(batches, rows(1200)))
        filler = small_disk / "filler"
        with pytest.raises(OSError, match="No space"), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(512))
        scripted.gate.set()
        await until(lambda: "waits" in caplog.text, 60)
        assert (await batches.store.batch(None, batch.id)).status == "in_progress"
        filler.unlink()
        batch = await ended(batches, batch)
        assert (batch.status, batch.position.completed) == ("completed", 1200)


@pytest.mark.slow
async def test_a_batch_whose_output_was_removed_fails_and_others_go_on(opened, scripted, monkeypatch):
    monkeypatch.setattr(batch_runner, "RETRY_PAUSE_S", 0.05)
    batch = await created(opened, rows(2000))
    await reached(opened, batch, lambda found: found.position.completed > 0)
    scripted.gate.clear()
    opened.folder.file(batch.output_id).unlink()
    # The run has the file open; it is opened again when the batch ends.
    scripted.gate.set()
    batch = await ended(opened, batch)
    assert (batch.status, [error.code for error in batch.errors]) == ("failed", ["file_lost"])
    assert batch.output_file_id is None
    assert (await ended(opened, await created(opened, rows(2000)))).status == "completed"


async def test_results_count_towards_the_quota_of_their_owner(opened, scripted):
    opened.store.max_stored_bytes = 300_000
    # Lines of 130 bytes, with results of 400.
    batch = await ended(opened, await created(opened, rows(1200), "one"))
    assert (batch.status, [error.code for error in batch.errors]) == ("failed", ["quota_exceeded"])
    assert 0 < batch.position.completed < 1200
    kept = await opened.store.file("one", batch.output_file_id)
    assert kept.bytes == batch.position.output_bytes < 300_000
    assert (await ended(opened, await created(opened, rows(1), "two"))).status == "completed"


@pytest.mark.parametrize(("nbytes", "is_allowed"), [(400, True), (401, False)])
async def test_an_upload_counts_once_while_it_becomes_a_file(opened, nbytes, is_allowed):
    """Another upload of the owner is counted between the transaction that stores the file and its end."""
    opened.store.max_stored_bytes = 1000
    database, may_go = opened.store.database, threading.Event()
    outcomes = []

    async def send_another() -> None:
        try:
            async with opened.receiving("", nbytes):
                outcomes.append(True)
        except QuotaExceededError:
            outcomes.append(False)

    with trio.fail_after(60):
        async with opened.receiving("", 600) as upload, trio.open_nursery() as nursery:
            upload.append([bytes(600)])
            nursery.start_soon(database.run, lambda _: may_go.wait(60))
            nursery.start_soon(partial(opened.complete, upload, filename="x", expire_s=None))
            await until(lambda: database._turn.statistics().tasks_waiting, 60)
            nursery.start_soon(send_another)
            await wait_all_tasks_blocked()
            may_go.set()
    assert outcomes == [is_allowed]


async def test_a_batch_gives_its_turn_back_while_no_engine_is_ready(opened, monkeypatch):
    monkeypatch.setattr(batch_runner, "RETRY_PAUSE_S", 0.05)
    monkeypatch.setattr(run, "RETRY_PAUSES_S", (0.01,))
    routes, is_ready = opened.runner.routes(), False

    async def refuse(lines, submitter):
        if submitter.client.label == "one" and not is_ready:
            raise EngineLoadingError("The model is being loaded.")
        return await routes.respond_all(lines, submitter)

    opened.runner.routes = lambda: attrs.evolve(routes, respond_all=refuse)
    waiting = await in_progress(opened, await created(opened, rows(1), "one"))
    assert (await ended(opened, await created(opened, rows(1), "two"))).status == "completed"
    assert (await opened.store.batch(None, waiting.id)).status == "in_progress"
    is_ready = True
    assert (await ended(opened, waiting)).status == "completed"


async def test_the_requests_of_a_window_count_once_however_often_it_is_tried(opened, monkeypatch):
    monkeypatch.setattr(batch_runner, "RETRY_PAUSE_S", 0.05)
    monkeypatch.setattr(run, "RETRY_PAUSES_S", (0.01,))
    routes, usage, tries = opened.runner.routes(), KeyUsage(), 0
    usage.requests.resize(1000, trio.current_time())

    async def refuse(lines, submitter):
        nonlocal tries
        tries += 1
        if tries < 7:
            raise EngineLoadingError("The model is being loaded.")
        return await routes.respond_all(lines, submitter)

    opened.runner.routes = lambda: attrs.evolve(routes, respond_all=refuse, usage_of=lambda _: usage)
    assert (await ended(opened, await created(opened, rows(300), "one"))).status == "completed"
    assert tries == 8, "two windows"
    assert 200 < usage.requests.used <= 300
    await until(lambda: not opened.runner._saved_up)


async def test_owners_take_turns(opened, scripted, monkeypatch):
    monkeypatch.setattr(batch_runner, "TURN_S", 0.0)
    runner = opened.runner
    scripted.gate.clear()
    large = await in_progress(opened, await created(opened, rows(2000), "one"))
    small = await created(opened, encoded([line(0, input="hello hello world hello hello world")]), "two")
    await until(lambda: runner.statistics().waiting, 60)
    assert (runner.statistics().unfinished, runner.statistics().waiting) == (2, 1)
    scripted.gate.set()
    assert (await ended(opened, small)).status == "completed"
    assert (await ended(opened, large)).position.completed == 2000
    of_small = max(len(row.prompt.token_ids) for batch in scripted.batches for row in batch.requests)
    (turn,) = [at for at, batch in enumerate(scripted.batches) if len(batch.requests[0].prompt.token_ids) == of_small]
    rows_before = sum(len(batch.requests) for batch in scripted.batches[:turn])
    assert 0 < rows_before < 2000
    assert runner.statistics().lines == 2001
    await until(lambda: not runner.statistics().unfinished, 60)


DAY_S = 24 * 3600


async def test_a_clock_that_jumps_does_not_expire_a_batch_that_is_computed(opened, scripted, monkeypatch):
    monkeypatch.setattr(batch_runner, "TURN_S", 0.0)
    scripted.gate.clear()
    batch = await in_progress(opened, await created(opened, rows(600), "one"))
    opened.store.clock = lambda: time.time() + 40 * DAY_S
    other = await created(opened, rows(1), "two")  # which has the next turn
    scripted.gate.set()
    assert (await ended(opened, batch)).status == (await ended(opened, other)).status == "completed"


def put_back(data: Path, days: int) -> None:
    """Make a stored batch ``days`` older, as it looks to a clock that is that far ahead."""
    with closing(sqlite3.connect(data / "batches.sqlite", isolation_level=None)) as connection:
        ((record,),) = connection.execute("SELECT record FROM batches").fetchall()
        batch = msgspec.json.decode(record)
        batch["expires_at"] -= days * DAY_S
        batch["times"] = {name: at - days * DAY_S for name, at in batch["times"].items()}
        connection.execute("UPDATE batches SET record = ?", (msgspec.json.encode(batch),))


@pytest.mark.parametrize("days", [40, -40])
async def test_a_start_with_a_wrong_clock_leaves_a_batch_its_completion_window(config, scripted, days):
    """A server that was off for so long looks the same: only the time of a running server counts."""
    scripted.gate.clear()
    async with opening(config, scripted) as batches:
        batch = await in_progress(batches, await created(batches, rows(600)))
    put_back(config.batch.data_dir, days)
    async with opening(config, scripted) as batches:
        left_s = batches.runner._scopes[batch.id].deadline - trio.current_time()
        assert 0.9 * DAY_S < left_s <= DAY_S
        scripted.gate.set()
        assert (await ended(batches, batch)).status == "completed"


async def test_a_sweep_removes_what_belongs_to_nothing_and_no_files_of_others(opened):
    file = await stored(opened, b"{}")
    left, other = opened.folder.file(new_id("file-")), opened.folder.file("notes.txt")
    left.write_bytes(b"x")
    other.write_bytes(b"x")
    await opened.sweep()
    assert sorted(each.name for each in left.parent.iterdir()) == sorted([file.id, "notes.txt"])


async def test_a_batch_whose_cancelling_client_leaves_is_cancelled_and_not_computed(opened, scripted):
    """The client leaves before the first transaction begins, or in the middle of the one that changes the state."""
    token, clock = trio.lowlevel.current_trio_token(), opened.store.clock
    scripted.gate.clear()
    for leaves_in_transaction in (False, True):
        batch = await in_progress(opened, await created(opened, rows(1)))
        await until(lambda: opened.runner.statistics().computing, 60)
        with trio.CancelScope() as scope:
            if leaves_in_transaction:

                def leave(scope: trio.CancelScope = scope) -> float:
                    trio.from_thread.run_sync(scope.cancel, trio_token=token)
                    return clock()

                opened.store.clock = leave
            else:
                scope.cancel()
            await opened.runner.cancel("", batch.id)
        opened.store.clock = clock
        assert scope.cancel_called
        found = await ended(opened, batch)
        assert (found.status, found.position.completed) == ("cancelled", 0)


async def steps_of(batches: OpenBatches) -> dict:
    file = await stored(batches, rows(1))
    batch = await ended(batches, await created(batches, rows(1)))
    store = batches.store

    async def cancel_one() -> None:
        await batches.runner.cancel("", (await created(batches, rows(600))).id)

    return {
        "store a file": lambda: stored(batches, b"{}"),
        "create a batch": lambda: created(batches, rows(1)),
        "cancel a batch": cancel_one,
        "read": lambda: store.file("", file.id),
        "list files": lambda: store.files("", Page(5)),
        "sweep": batches.sweep,
        "commit": lambda: store.commit(batch.id, batch.position),
    }


async def test_everything_can_be_cancelled_at_each_of_its_steps_and_nothing_stays(opened, service, subtests):
    for name, work in (await steps_of(opened)).items():
        with subtests.test(name):
            for at in range(1, 60):
                with cancelled_before(at) as scope:
                    await work()
                if not scope.cancelled_caught:
                    break
            else:
                raise AssertionError
            for batch in await opened.store.unfinished():
                await ended(opened, batch)
            assert list(opened.folder.upload("x").parent.iterdir()) == []
            assert opened._uploads == set()
            await wait_idle(service)
    await opened.sweep()
    known = await opened.store.known_ids()
    assert {each.name for each in opened.folder.file("x").parent.iterdir()} == known
