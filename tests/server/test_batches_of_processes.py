"""Files and batches of servers of several processes: real ones, killed by real signals."""

import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import trio

from tests.api.routes.test_batches import client_at, created, ended, uploaded
from tests.api.routes.test_uploads import BEGIN, END, HEADERS
from tests.conftest import client_of
from tests.lanes import sampled
from tests.models.model_families import write_family
from tests.models.vision_families import clip
from tests.rendering.media.image_server import says, serving
from tests.rendering.media.images import encoded as picture
from tests.runs.requests.line_files import ENDPOINT, encoded, line
from tests.server.server_process import API_PROCESS, SCRIPTED_ASGI, ServerProcess, hypercorned, launched, scripted
from trio_pool_serve.api.http.forwarding import ANSWER_S, ASK_S
from trio_pool_serve.runs.batch_api.batch_api import RETRY_S

KEY_ONE = {"authorization": "Bearer one"}
ROWS = 2048
CONTENT = encoded([line(number) for number in range(ROWS)])


@pytest.fixture
def model(scripted_folder: Path) -> str:
    return f"model={scripted_folder}"


def workers(count: int, data: Path) -> list[str]:
    return ["--engine", "process", "--replicas", "1", "--api-workers", str(count), "--data-dir", str(data)]


async def until_committed(client: openai.AsyncOpenAI, batch_id: str) -> None:
    with trio.fail_after(60):
        while not (await client.batches.retrieve(batch_id)).request_counts.completed:  # noqa: ASYNC110
            await trio.sleep(0.002)


async def uninterrupted(client: openai.AsyncOpenAI, file_id: str) -> bytes:
    batch = await client.batches.create(input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h")
    batch = await ended(client, batch)
    assert batch.status == "completed", batch
    return (await client.files.content(batch.output_file_id)).content


@sampled(
    ("count", "number"), [(1, signal.SIGKILL), (3, signal.SIGKILL), (1, signal.SIGTERM)], keep=[(1, signal.SIGKILL)]
)
async def test_a_server_that_ends_leaves_its_batches_to_the_next_which_writes_the_same_bytes(
    tmp_path, model, count, number
):
    arguments = workers(count, tmp_path / "data")
    async with scripted(tmp_path / "first", model, *arguments) as server, client_at(server.url) as client:
        batch = await created(client, CONTENT)
        await until_committed(client, batch.id)
        server.signal(number)
        await server.wait_exit()
    async with scripted(tmp_path / "second", model, *arguments) as server, client_at(server.url) as client:
        known = await client.batches.retrieve(batch.id)
        assert known.status == "in_progress"
        assert 0 < known.request_counts.completed < ROWS
        batch = await ended(client, known)
        assert batch.status == "completed"
        assert batch.request_counts.completed == ROWS
        interrupted = (await client.files.content(batch.output_file_id)).content
        assert interrupted == await uninterrupted(client, batch.input_file_id)
        await server.drain()


def of_four(folder: Path) -> tuple[str, ...]:
    """Flags for four API processes, in addition to the flags of ``launched``."""
    return "--engine", "process", "--api-workers", "4", "--data-dir", str(folder / "data")


async def completed(client: openai.AsyncOpenAI, lines: list[dict], endpoint: str) -> int:
    """Return how many of the lines of a batch are completed at its end."""
    batch = await ended(client, await created(client, encoded(lines), endpoint=endpoint))
    assert batch.status == "completed", batch
    return batch.request_counts.completed


@pytest.mark.slow
async def test_a_batch_of_images_with_four_times_the_memory_fetches_each_of_them_once(tmp_path):
    """Each process has a quarter of the memory, and a client half of that."""
    size = 50_000
    images = {f"/{number}": says(picture().ljust(size, b"\0")) for number in range(120)}
    flags = ("--memory-budget-bytes", str(4 * 2 * 120 * size // 4), "--allowed-media-domains", "127.0.0.0/8")
    (tmp_path / "server").mkdir()
    async with (
        launched(tmp_path / "server", f"m={clip(tmp_path / 'clip')}", *of_four(tmp_path), *flags) as server,
        serving(images) as image_server,
        client_at(server.url) as client,
    ):
        asked = [{"model": "m", "input": image_server.url(path), "modality": "image"} for path in images]
        lines = [line(number, **fields) for number, fields in enumerate(asked)]
        assert await completed(client, lines, ENDPOINT) == 120
        assert len(image_server.heads) == 120


@pytest.mark.slow
async def test_a_batch_of_vectors_of_tokens_with_more_than_the_memory_is_completed(tmp_path):
    """Two lines have as many vectors as a client may have bytes for."""
    folder = write_family(tmp_path / "bert", name="bert")
    flags = ("--memory-budget-bytes", str(4 * 2 * 2 * 40 * 32 * 4), *of_four(tmp_path))
    (tmp_path / "server").mkdir()
    async with launched(tmp_path / "server", f"m={folder}", *flags) as server, client_at(server.url) as client:
        fields = {"model": "m", "task": "token_embed", "input": "a b " * 20}
        lines = [line(number, url="/pooling", **fields) for number in range(120)]
        assert await completed(client, lines, "/pooling") == 120


def owner_of(server: ServerProcess, data: Path) -> psutil.Process:
    """Return the process that has the data folder open."""
    (owner,) = (
        process
        for process in server.processes(API_PROCESS)
        if str(data / "batches.sqlite") in (file.path for file in process.open_files())
    )
    return owner


async def test_the_process_that_has_the_files_may_be_killed(tmp_path, model):
    data = tmp_path / "data"
    async with scripted(tmp_path / "first", model, *workers(3, data)) as server:
        await server.wait_joined(3, headers=KEY_ONE)
        async with client_at(server.url) as client:
            file = await uploaded(client, CONTENT)
            expected = await uninterrupted(client, file.id)
            batch = await client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
            await until_committed(client, batch.id)
        owner = owner_of(server, data)
        owner.kill()
        await trio.to_thread.run_sync(owner.wait)
        async with client_of(server.url) as http:
            answer = await http.get(f"/v1/batches/{batch.id}")
            if answer.status_code == 503:  # of a process that had begun to ask the one that was killed
                assert "retry-after" in answer.headers
        async with client_at(server.url) as client:
            batch = await ended(client, await client.batches.retrieve(batch.id))
            assert (batch.status, batch.request_counts.completed) == ("completed", ROWS)
            assert (await client.files.content(batch.output_file_id)).content == expected
        assert owner_of(server, data).pid != owner.pid


@asynccontextmanager
async def connected_to(
    process: psutil.Process, server: ServerProcess, **headers: str
) -> AsyncIterator[httpx.AsyncClient]:
    """A client with a connection that the process has accepted: the only one that could."""
    others = [other for other in server.processes(API_PROCESS) if other != process]
    for other in others:
        other.suspend()
    try:
        async with client_of(server.url) as client:
            client.headers.update(headers)
            await client.get("/livez")
            for other in others:
                other.resume()
            yield client
    finally:
        for other in others:
            other.resume()


@pytest.mark.slow
async def test_every_process_answers_for_the_one_that_has_the_files(tmp_path, model):
    data = tmp_path / "data"
    keys = ("--api-key", "one,two")
    async with scripted(tmp_path / "first", model, *workers(3, data), *keys) as server:
        await server.wait_joined(3, headers=KEY_ONE)
        large = bytes(range(256)) * 20_000
        async with client_at(server.url, "one") as client:
            file = await uploaded(client, large)
        owner = owner_of(server, data)
        others = [process for process in server.processes(API_PROCESS) if process != owner]
        assert len(others) == 2
        for process in (owner, *others):
            async with connected_to(process, server, authorization="Bearer one") as http:
                content = f"/v1/files/{file.id}/content"
                whole = await http.get(content, headers={"X-Request-Id": "mine"})
                assert (whole.status_code, whole.content, whole.headers["x-request-id"]) == (200, large, "mine")
                assert [name for name, _ in whole.headers.multi_items()].count("x-request-id") == 1
                part = await http.get(content, headers={"Range": "bytes=5-9"})
                assert (part.status_code, part.content) == (206, large[5:10])
                head = await http.head(content)
                assert (head.status_code, head.headers["content-length"]) == (200, str(len(large)))
                assert (await http.get("/v1/files", headers={"Authorization": "Bearer two"})).json()["data"] == []
                for key, status in (("two", 404), ("three", 401)):
                    refused = await http.get(f"/v1/files/{file.id}", headers={"Authorization": f"Bearer {key}"})
                    assert refused.status_code == status
                fields = {"files": {"file": ("rows.jsonl", large)}, "data": {"purpose": "batch"}}
                stored = (await http.post("/v1/files", **fields)).json()
                assert stored["bytes"] == len(large)
                wrong = await http.post("/v1/batches", json={"input_file_id": stored["id"], "endpoint": "/x"})
                assert wrong.status_code == 400
                assert (await http.delete(f"/v1/files/{stored['id']}")).json()["deleted"]


async def slowly(pause_s: float) -> AsyncIterator[bytes]:
    """The form of an upload in two pieces."""
    yield BEGIN
    await trio.sleep(pause_s)
    yield END


@pytest.mark.slow
async def test_a_stopped_process_that_has_the_files_is_not_waited_for(tmp_path, model):
    """The kernel accepts connections for it. An upload that takes longer than the wait for it goes on."""
    data = tmp_path / "data"
    async with scripted(tmp_path / "first", model, *workers(2, data)) as server:
        await server.wait_joined(2, headers=KEY_ONE)
        async with client_at(server.url) as client:
            file = await uploaded(client, b"{}")
        owner = owner_of(server, data)
        (other,) = [process for process in server.processes(API_PROCESS) if process != owner]
        async with connected_to(other, server) as http:
            slow = await http.post("/v1/files", content=slowly(2 * (ASK_S + ANSWER_S)), headers=HEADERS)
            assert slow.status_code == 200
            owner.suspend()
            try:
                with trio.fail_after(4 * (ASK_S + ANSWER_S)):
                    answers = [await http.get("/v1/files"), await http.get(f"/v1/files/{file.id}/content")]
                    answers.append(await http.post("/v1/files", content=slowly(0), headers=HEADERS))
            finally:
                owner.resume()
            assert [(answer.status_code, "retry-after" in answer.headers) for answer in answers] == [(503, True)] * 3
            assert (await http.get(f"/v1/files/{file.id}/content")).content == b"{}"


@pytest.mark.slow
async def test_a_folder_that_is_removed_is_opened_again_by_one_of_the_processes(tmp_path, model):
    """Whichever of them that is, all of them have what was stored since."""
    data = tmp_path / "data"
    async with scripted(tmp_path / "first", model, *workers(2, data)) as server:
        await server.wait_joined(2, headers=KEY_ONE)
        async with client_at(server.url) as client:
            await uploaded(client, b"{}")
        shutil.rmtree(data)
        await trio.sleep(2 * RETRY_S)  # the others look for the folder meanwhile
        async with client_at(server.url) as client:
            with trio.fail_after(60):
                kept = await uploaded(client.with_options(max_retries=10), b"{}")
        processes = server.processes(API_PROCESS)
        assert len(processes) == 2
        for process in processes:
            async with connected_to(process, server) as http:
                assert [each["id"] for each in (await http.get("/v1/files")).json()["data"]] == [kept.id]
        server.signal(signal.SIGKILL)
    async with (
        scripted(tmp_path / "second", model, *workers(2, data)) as server,
        client_at(server.url) as client,
    ):
        assert (await client.files.content(kept.id)).content == b"{}"


@pytest.mark.slow
async def test_a_folder_that_another_server_has_is_said_to_be(tmp_path, model):
    arguments = workers(1, tmp_path / "data")
    async with (
        scripted(tmp_path / "first", model, *arguments) as one,
        scripted(tmp_path / "second", model, *arguments) as two,
    ):
        async with client_at(one.url) as client:
            await uploaded(client, b"{}")
        async with client_of(two.url) as http:
            answer = await http.get("/v1/files")
            assert answer.status_code == 503
            assert "in use by another server" in answer.json()["error"]["message"]
            assert str(tmp_path) not in answer.text
            assert int(answer.headers["retry-after"]) > 0
            assert (await http.post("/v1/embeddings", json={"input": "hello"})).status_code == 200
        one.signal()
        await one.wait_exit()
        async with client_at(two.url) as client:
            assert len((await client.files.list()).data) == 1


@pytest.mark.slow
async def test_workers_of_plain_hypercorn_share_the_files(tmp_path, model):
    env = {
        "TRIO_POOL_SERVE_MODEL": model,
        "TRIO_POOL_SERVE_DATA_DIR": str(tmp_path / "data"),
        "TRIO_POOL_SERVE_ENGINE": "local",
    }
    async with hypercorned(tmp_path, SCRIPTED_ASGI, "--workers", "2", env=env) as server:
        for _ in range(10):
            async with client_at(server.url).with_options(max_retries=10) as client:  # one of them may be loading
                batch = await ended(client, await created(client, encoded([line(0)])))
                assert batch.status == "completed"
        async with client_at(server.url) as client:
            assert len((await client.batches.list()).data) == 10
