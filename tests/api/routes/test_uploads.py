"""Uploads that go wrong: what they leave behind, and what they cost."""

import logging
import random
import resource
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import attrs
import httpx
import psutil
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from tests.api.serving import connect, serving
from tests.conftest import assert_idle, running, until
from trio_pool_serve.api.http.upload_form import UploadForm
from trio_pool_serve.api.routes.stored_files import MAX_FILE_BYTES
from trio_pool_serve.app import create_app
from trio_pool_serve.config import BatchConfig, Config
from trio_pool_serve.errors import InvalidRequestError, PayloadTooLargeError
from trio_pool_serve.service import Service

BOUNDARY = "b0undary"

PURPOSE = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'.encode()

FILE = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'.encode()

BEGIN = PURPOSE + FILE

END = f"\r\n--{BOUNDARY}--\r\n".encode()

HEADERS = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}

HEAD = (
    f"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: {HEADERS['content-type']}\r\ncontent-length: %d\r\n\r\n"
).encode()


@pytest.fixture
def config(scripted_folder: Path, tmp_path: Path) -> Config:
    return Config(models=(f"model={scripted_folder}",), batch=BatchConfig(data_dir=tmp_path / "data"))


@pytest.fixture
def data(config: Config) -> Path:
    assert config.batch.data_dir is not None
    return config.batch.data_dir


def left_in(data: Path) -> list[str]:
    """Return the names of all that is stored beside the database."""
    return sorted(each.name for each in [*(data / "files").glob("*"), *(data / "uploads").glob("*")])


async def upload(client: httpx.AsyncClient, content: bytes | AsyncIterator[bytes]) -> httpx.Response:
    return await client.post("/v1/files", content=content, headers=HEADERS)


async def assert_unusable(client: httpx.AsyncClient) -> None:
    """Nothing can be stored, and the rest is served."""
    answer = await upload(client, BEGIN + b"x" + END)
    said = "The server cannot use its data folder. Its log says why."
    assert (answer.status_code, answer.json()["error"]["message"]) == (507, said)
    assert (await client.post("/v1/embeddings", json={"input": "hello"})).status_code == 200


async def stored(client: httpx.AsyncClient, content: bytes) -> dict:
    """Upload a file, which must be stored as it was sent."""
    answer = await upload(client, BEGIN + content + END)
    assert (answer.status_code, answer.json()["bytes"]) == (200, len(content))
    assert (await client.get(f"/v1/files/{answer.json()['id']}/content")).content == content
    return answer.json()


async def test_an_upload_is_stored_as_it_was_sent_and_missing_once_its_bytes_were_removed(client, data):
    content = random.Random(0).randbytes(3_000_000) + b"\r\n--" + BOUNDARY[:-1].encode() + b"\r\n"
    file = await stored(client, content)
    assert left_in(data) == [file["id"]]
    (data / "files" / file["id"]).unlink()
    answer = await client.get(f"/v1/files/{file['id']}/content")
    assert (answer.status_code, file["id"] in answer.json()["error"]["message"]) == (404, True)


WRONG = {
    "no multipart": ({"content-type": "application/json"}, b"{}", 415),
    "no content type": ({}, BEGIN + b"x" + END, 415),
    "no boundary": ({"content-type": "multipart/form-data"}, BEGIN + b"x" + END, 400),
    "a boundary that is too long": ({"content-type": f"multipart/form-data; boundary={'b' * 300}"}, b"", 400),
    "another boundary": ({"content-type": "multipart/form-data; boundary=other"}, BEGIN + b"x" + END, 400),
    "nothing": (HEADERS, b"", 400),
    "no end": (HEADERS, BEGIN + b"x" * 1000, 400),
    "no file": (HEADERS, PURPOSE + b"--b0undary--\r\n", 400),
    "no purpose": (HEADERS, FILE + b"x" + END, 400),
    "two files": (HEADERS, BEGIN + b"x\r\n" + BEGIN + b"x" + END, 400),
    "many parts": (HEADERS, PURPOSE * 40 + END, 400),
    "a field that is too long": (HEADERS, BEGIN.replace(b"batch", b"batch" * 1000) + b"x" + END, 400),
    "a header that never ends": (HEADERS, b"--b0undary\r\nX: " + b"x" * 2_000_000, 400),
    "no disposition": (HEADERS, b"--b0undary\r\nX: y\r\n\r\nx" + END, 400),
    "a part without a name": (HEADERS, b"--b0undary\r\nContent-Disposition: form-data\r\n\r\nx" + END, 400),
    "a name that is no text": (HEADERS, BEGIN.replace(b"purpose", b"\xff\xfe") + b"x" + END, 400),
    "line ends only": (HEADERS, b"\r\n" * 500_000, 400),
    "boundaries only": (HEADERS, b"--b0undary" * 50_000, 400),
}


async def test_a_form_that_is_not_understood_leaves_nothing(client, data, subtests):
    for name, (headers, content, status) in WRONG.items():
        with subtests.test(name):
            answer = await client.post("/v1/files", content=content, headers=headers)
            assert answer.status_code == status, answer.text
            assert answer.json()["error"]["message"]
            assert left_in(data) == []
    await stored(client, b"x")


@given(
    st.lists(
        st.sampled_from([BEGIN, END, b"\r\n", b"--", b"\r", b"\n", b"--b0undary", b"x" * 99, b"\xff"]), max_size=12
    )
)
def test_any_bytes_are_a_form_or_refused(parts):
    form = UploadForm(BOUNDARY.encode(), 1000)
    try:
        for part in [*parts, None]:
            form.take(part)
    except (InvalidRequestError, PayloadTooLargeError):
        pass


@given(st.binary(max_size=300), st.integers(1, 40))
def test_a_file_does_not_depend_on_how_its_form_is_cut(content, size):
    whole = BEGIN + content + END
    form = UploadForm(BOUNDARY.encode(), 1000)
    found = [part for begin in range(0, len(whole), size) for part in form.take(whole[begin : begin + size])]
    assert b"".join([*found, *form.take(None)]) == content
    assert (form.fields, form.filename) == ({"purpose": "batch"}, "a.jsonl")


async def test_a_client_that_leaves_in_the_middle_leaves_nothing(client, service, data, url):
    await stored(client, b"x")
    before = left_in(data)
    async with await connect(url) as stream:
        await stream.send_all(HEAD % 9_000_000 + BEGIN + b"x" * 1_000_000)
        await until(lambda: any(path.stat().st_size for path in (data / "uploads").glob("*")), 30)
    await until(lambda: left_in(data) == before, 30)
    assert (await client.get("/v1/files")).json()["data"][0]["bytes"] == 1
    assert_idle(service)


async def test_a_file_that_is_too_large_is_refused_before_it_is_sent_and_while_it_is(client, data, url, monkeypatch):
    async with await connect(url) as stream:
        await stream.send_all(HEAD % (MAX_FILE_BYTES + 10**6))
        with trio.fail_after(30):
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 413 ")
    monkeypatch.setattr("trio_pool_serve.api.routes.stored_files.MAX_FILE_BYTES", 1000)
    assert (await upload(client, BEGIN + b"x" * 1001 + END)).status_code == 413
    await stored(client, b"x" * 1000)
    assert len(left_in(data)) == 1


async def test_an_upload_is_not_kept_in_memory_and_other_routes_refuse_such_bodies(client, config):
    process = psutil.Process()
    size = 100 * 2**20
    before = process.memory_info().rss
    peak = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal peak
        yield BEGIN
        piece = b"x" * 2**16
        for _ in range(size // len(piece)):
            peak = max(peak, process.memory_info().rss)
            yield piece
        yield END

    assert (await upload(client, pieces())).json()["bytes"] == size
    assert peak - before < size / 4
    large = b" " * (50 * 2**20)
    for path in ("/v1/embeddings", "/v1/batches"):
        assert (await client.post(path, content=large)).status_code == 413


async def test_a_full_disk_refuses_uploads_and_keeps_the_rest(config, scripted, small_disk, caplog):
    config = attrs.evolve(config, batch=attrs.evolve(config.batch, data_dir=small_disk / "data"))
    async with serving(config, scripted) as (_service, client):
        kept = await stored(client, b"x" * 1000)
        for _ in range(3):
            answer = await upload(client, BEGIN + b"x" * 3_000_000 + END)
            assert answer.status_code == 507
            assert answer.json()["error"]["message"] == "The server's disk is full."
            assert left_in(small_disk / "data") == [kept["id"]]
        assert (await client.get(f"/v1/files/{kept['id']}/content")).content == b"x" * 1000
        assert (await client.post("/v1/embeddings", json={"input": "hello"})).status_code == 200
    assert caplog.text.count(f"{small_disk / 'data' / 'uploads'}") == 3


async def test_a_folder_that_cannot_be_created_is_said_and_nothing_else_fails(config, scripted, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    config = attrs.evolve(config, batch=attrs.evolve(config.batch, data_dir=tmp_path / "file" / "data"))
    async with serving(config, scripted) as (_service, client):
        await assert_unusable(client)
        assert f"{tmp_path / 'file' / 'data'}: Not a directory" in caplog.text
        (tmp_path / "file").unlink()
        await stored(client, b"x")


@pytest.mark.parametrize("is_made_again", [False, True])
async def test_uploads_to_a_folder_that_was_removed_are_refused_or_kept(config, scripted, data, is_made_again):
    """Every upload answered with 200 is there after the next start, whoever makes the folder again."""
    async with serving(config, scripted) as (_, client):
        await stored(client, b"lost")
        shutil.rmtree(data)
        if is_made_again:
            for name in ("files", "uploads"):
                (data / name).mkdir(parents=True)
        answer = await upload(client, BEGIN + b"refused" + END)
        kept = {answer.json()["id"]} if answer.status_code == 200 else set()  # the server may have noticed by itself
        if not kept:
            said = "Someone has removed or replaced what was in the server's data folder."
            assert (answer.status_code, answer.json()["error"]["message"]) == (507, said)
        with trio.fail_after(30):
            while (last := await upload(client, BEGIN + b"kept" + END)).status_code != 200:
                assert last.status_code in (503, 507)
        kept.add(last.json()["id"])
        assert {file["id"] for file in (await client.get("/v1/files")).json()["data"]} == kept
    async with serving(config, scripted) as (_, client):
        assert (await client.get(f"/v1/files/{last.json()['id']}/content")).content == b"kept"


async def test_a_folder_in_it_that_is_removed_is_made_again_at_once_and_at_the_next_start(config, scripted, data):
    for _ in range(2):
        async with serving(config, scripted) as (_service, client):
            for name in ("files", "uploads"):
                await stored(client, b"x")
                shutil.rmtree(data / name)


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


@pytest.mark.parametrize("has_files", [False, True])
async def test_a_read_only_folder_is_logged_at_the_start_and_refuses_uploads(
    config, scripted, small_disk, caplog, has_files
):
    """Not at the first upload: an operator looks at the log when the server has been started."""
    data = small_disk / "data"
    config = attrs.evolve(config, batch=attrs.evolve(config.batch, data_dir=data))
    if has_files:
        async with running(Service(config, lambda *_: scripted)) as service:
            create_app(config, service)
            await service.batches.locate(create=True)
    else:
        data.mkdir()
    remount(small_disk, "ro")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        async with serving(config, scripted) as (service, client):
            await until(lambda: f"this process does not serve files and batches: {data} is read-only" in caplog.text)
            await assert_unusable(client)
            remount(small_disk, "rw")
            await stored(client, b"x")


async def test_uploads_leave_files_for_the_server_to_open(client, data):
    """An eighth of the files that the server may open is for uploads; further uploads wait."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    goes_on, answers = trio.Event(), []

    async def slow() -> AsyncIterator[bytes]:
        yield BEGIN + b"{}"
        await goes_on.wait()
        yield END

    async def send() -> None:
        answers.append((await upload(client, slow())).status_code)

    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, limits[1]))
        async with trio.open_nursery() as nursery:
            for _ in range(60):
                nursery.start_soon(send)
            await until(lambda: len(left_in(data)) >= 50, 60)
            await wait_all_tasks_blocked(0.05)
            assert len(left_in(data)) == 50
            goes_on.set()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert answers == [200] * 60
