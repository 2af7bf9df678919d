"""OpenAI's Files and Batch API with OpenAI's client, over real sockets."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import attrs
import httpx
import openai
import pytest
import trio

from tests.api.serving import key_file_of, serving
from tests.conftest import client_of
from tests.runs.requests.line_files import ENDPOINT, decoded, encoded, line, rows
from trio_pool_serve.access import api_keys
from trio_pool_serve.config import BatchConfig, Config, NetworkConfig
from trio_pool_serve.runs.batch_api import batch_store
from trio_pool_serve.runs.batch_api.stored_records import FINAL
from trio_pool_serve.service import Service


@pytest.fixture
def config(scripted_folder: Path, tmp_path: Path) -> Config:
    return Config(
        models=(f"model={scripted_folder}", f"other={scripted_folder}"), batch=BatchConfig(data_dir=tmp_path / "data")
    )


def client_at(url: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


@asynccontextmanager
async def asked_by(config: Config, scripted, *keys: str) -> AsyncIterator[tuple[Service, list[openai.AsyncOpenAI]]]:
    """Serve; gives the service, and a client for each key."""
    async with serving(config, scripted) as (service, http), AsyncExitStack() as stack:
        url = str(http.base_url).removesuffix("/")
        yield service, [await stack.enter_async_context(client_at(url, key)) for key in keys]


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_at(url) as one:
        yield one


async def uploaded(client: openai.AsyncOpenAI, content: bytes, **options) -> openai.types.FileObject:
    return await client.files.create(file=("rows.jsonl", content), purpose="batch", **options)


async def created_for(client: openai.AsyncOpenAI, file_id: str, **options) -> openai.types.Batch:
    return await client.batches.create(
        **{"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h", **options}
    )


async def created(client: openai.AsyncOpenAI, content: bytes, **options) -> openai.types.Batch:
    return await created_for(client, (await uploaded(client, content)).id, **options)


async def reached(client: openai.AsyncOpenAI, batch: openai.types.Batch, condition) -> openai.types.Batch:
    with trio.fail_after(60):
        while not condition(batch):
            await trio.sleep(0.002)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def ended(client: openai.AsyncOpenAI, batch: openai.types.Batch) -> openai.types.Batch:
    return await reached(client, batch, lambda found: found.status in FINAL)


async def content_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict]:
    assert file_id is not None
    return decoded((await client.files.content(file_id)).content)


async def test_a_batch_of_the_client_of_openai_is_computed(client):
    file = await uploaded(client, rows(600))
    assert (file.filename, file.purpose, file.object) == ("rows.jsonl", "batch", "file")
    batch = await created_for(client, file.id, metadata={"a": "b"})
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"a": "b"})
    assert batch.expires_at == batch.created_at + 24 * 3600
    batch = await ended(client, batch)
    assert batch.status == "completed", batch
    assert batch.error_file_id is None
    assert batch.model == "model"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (600, 600, 0)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    results = await content_of(client, batch.output_file_id)
    assert [result["custom_id"] for result in results] == [f"row-{number}" for number in range(600)]
    direct = await client.embeddings.create(model="model", input="w3 hello world")
    body = results[3]["response"]["body"]
    assert body["data"][0]["embedding"] == direct.data[0].embedding
    assert body["usage"]["prompt_tokens"] == direct.usage.prompt_tokens
    assert body["created"] == file.created_at
    assert {result["response"]["status_code"] for result in results} == {200}
    assert len({result["id"] for result in results}) == 600
    assert batch.usage.input_tokens == batch.usage.total_tokens == 600 * direct.usage.total_tokens
    output = await client.files.retrieve(batch.output_file_id)
    assert output.purpose == "batch_output"
    assert output.bytes == len((await client.files.content(output.id)).content)


async def test_lines_may_name_their_model_with_a_suffix_as_requests_do(client):
    content = encoded([line(0, model="model-query"), line(1, model="model")])
    batch = await ended(client, await created(client, content))
    assert (batch.status, batch.request_counts.completed) == ("completed", 2), batch.errors


async def test_lines_that_fail_are_in_a_file_of_errors(client):
    lines = [line(0), line(1, dimensions=10_000), line(2)]
    batch = await ended(client, await created(client, encoded(lines)))
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
    (failure,) = await content_of(client, batch.error_file_id)
    assert (failure["custom_id"], failure["response"]["status_code"], failure["error"]) == ("row-1", 400, None)
    assert "dimensions" in failure["response"]["body"]["error"]["message"]
    assert [result["custom_id"] for result in await content_of(client, batch.output_file_id)] == ["row-0", "row-2"]
    batch = await ended(client, await created(client, encoded(lines[1:2])))
    assert (batch.status, batch.output_file_id) == ("completed", None)
    assert len(await content_of(client, batch.error_file_id)) == 1


def raw(**changes: object) -> dict:
    return {name: value for name, value in {**line(1), **changes}.items() if value is not None}


WRONG = {
    "no JSON": (b"{\n", [(1, "invalid_json_line")]),
    "a list": (b"[1]\n", [(1, "invalid_json_line")]),
    "a body that is no object": (encoded([raw(body="text")]), [(1, "invalid_json_line")]),
    "no custom id": (encoded([line(0), raw(custom_id=None)]), [(2, "missing_required_parameter")]),
    "no body": (encoded([raw(body=None)]), [(1, "missing_required_parameter")]),
    "another method": (encoded([raw(method="GET")]), [(1, "invalid_method")]),
    "an id twice": (encoded([line(1), line(2), line(1)]), [(3, "duplicate_custom_id")]),
    "another url": (encoded([line(1), raw(custom_id="b", url="/v1/rerank")]), [(2, "url_mismatch")]),
    "a model that is not there": (encoded([line(1, model="none")]), [(1, "model_mismatch")]),
    "two models": (encoded([line(1), line(2, model="other")]), [(2, "model_mismatch")]),
    "more lines than a batch may have": (rows(50_001), [(None, "too_many_tasks")]),
    "nothing": (b"", [(None, "empty_file")]),
    "blank lines": (b"\n \r\n\n", [(None, "empty_file")]),
    "a line that is too long": (encoded([line(1), line(2, input="x" * 9000)]), [(2, "line_too_long")]),
    "not UTF-8": (encoded([line(1)]).replace(b"row-1", b"\xff"), [(1, "invalid_json_line")]),
    "two things": (b"{\n" + encoded([raw(url="/x")]), [(1, "invalid_json_line"), (2, "url_mismatch")]),
}


async def test_bad_input_is_a_batch_that_fails_and_says_which_lines_are_wrong(config, scripted, subtests):
    config = attrs.evolve(config, network=NetworkConfig(max_body_bytes=8192))
    async with asked_by(config, scripted, "none") as (_, (client,)):
        for name, (content, errors) in WRONG.items():
            with subtests.test(name):
                batch = await ended(client, await created(client, content))
                assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
                assert batch.failed_at is not None
                assert batch.errors.object == "list"
                assert [(error.line, error.code) for error in batch.errors.data] == errors
    assert not scripted.batches


async def test_requests_that_are_wrong_are_refused(client):
    file = await uploaded(client, rows(1))
    wrong = {
        "endpoint": {"endpoint": "/v1/chat/completions"},
        "completion_window": {"completion_window": "soon"},
        "input_file_id": {"input_file_id": ""},
        "metadata": {"metadata": {"k" * 65: "v"}},
    }
    for param, changes in wrong.items():
        with pytest.raises(openai.BadRequestError) as caught:
            await created_for(client, file.id, **changes)
        assert caught.value.body["param"] == param
    expires = {"anchor": "created_at", "seconds": 3600}
    for options in ({"purpose": "fine-tune"}, {"purpose": "batch", "expires_after": {**expires, "seconds": 10}}):
        with pytest.raises(openai.BadRequestError):
            await client.files.create(file=("x", b"{}"), **options)
    file = await uploaded(client, b"{}", expires_after=expires)
    assert file.expires_at == file.created_at + 3600
    await assert_missing(client, "file-0", "batch_0")


async def assert_missing(client: openai.AsyncOpenAI, file_id: str, batch_id: str) -> None:
    methods = [client.files.retrieve, client.files.content, client.files.delete, partial(created_for, client)]
    asked = [partial(method, file_id) for method in methods]
    for missing in (*asked, partial(client.batches.retrieve, batch_id), partial(client.batches.cancel, batch_id)):
        with pytest.raises(openai.NotFoundError):
            await missing()


async def test_lists_are_paged(client):
    files = [await uploaded(client, b"%d" % number) for number in range(5)]
    ids = [file.id for file in files]
    assert [file.id async for file in client.files.list()] == ids[::-1]
    assert [file.id async for file in client.files.list(limit=2, order="asc")] == ids
    page = await client.files.list(limit=2, after=ids[3])
    assert ([file.id for file in page.data], page.has_more) == ([ids[2], ids[1]], True)
    assert [file.id async for file in client.files.list(purpose="batch_output")] == []
    batches = [(await created_for(client, file_id)).id for file_id in ids[:3]]
    assert [batch.id async for batch in client.batches.list(limit=1)] == batches[::-1]


async def test_nothing_is_on_the_disk_before_the_first_upload(client, config):
    assert (await client.files.list()).data == []
    assert (await client.batches.list()).data == []
    with pytest.raises(openai.NotFoundError):
        await created_for(client, "file-0")
    assert not config.batch.data_dir.exists()
    await uploaded(client, b"{}")
    for folder in (config.batch.data_dir, config.batch.data_dir / "files", config.batch.data_dir / "uploads"):
        assert folder.stat().st_mode & 0o777 == 0o700


async def test_a_deleted_file_is_gone_and_one_that_is_read_stays(client, config, scripted):
    scripted.gate.clear()
    batch = await created(client, rows(1))
    with pytest.raises(openai.ConflictError):
        await client.files.delete(batch.input_file_id)
    scripted.gate.set()
    await ended(client, batch)
    assert (await client.files.delete(batch.input_file_id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.content(batch.input_file_id)
    assert not (config.batch.data_dir / "files" / batch.input_file_id).exists()


async def test_an_idempotency_key_creates_one_batch(client):
    file = await uploaded(client, rows(1))
    create = partial(created_for, client, file.id, extra_headers={"Idempotency-Key": "k"})
    assert (await create()).id == (await create()).id
    with pytest.raises(openai.ConflictError):
        await create(completion_window="25h")
    assert len((await client.batches.list()).data) == 1


async def test_a_cancelled_batch_keeps_what_was_committed(client, scripted, service):
    batch = await reached(
        client, await created(client, rows(2000)), lambda found: found.request_counts and found.request_counts.completed
    )
    scripted.gate.clear()
    cancelled = await client.batches.cancel(batch.id)
    assert cancelled.status in ("cancelling", "cancelled")
    scripted.gate.set()
    batch = await ended(client, cancelled)
    assert batch.status == "cancelled"
    assert batch.cancelling_at <= batch.cancelled_at
    results = await content_of(client, batch.output_file_id)
    assert 0 < len(results) < 2000
    assert [result["custom_id"] for result in results] == [f"row-{number}" for number in range(len(results))]
    assert batch.request_counts.completed == len(results)
    assert batch.error_file_id is None
    assert (await client.batches.cancel(batch.id)).status == "cancelled"
    completed = await ended(client, await created(client, rows(1)))
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel(completed.id)


async def test_a_batch_that_expires_has_the_other_lines_among_its_errors(client, scripted, service):
    scripted.gate.clear()
    batch = await created(client, rows(700), completion_window="1m")
    await reached(client, batch, lambda found: found.status == "in_progress")
    scope = service.batches._opened.runner._scopes[batch.id]
    assert 30 < scope.deadline - trio.current_time() <= 60
    scope.deadline = trio.current_time()
    scripted.gate.set()
    batch = await ended(client, batch)
    assert batch.status == "expired"
    assert batch.finalizing_at <= batch.expired_at
    failures = await content_of(client, batch.error_file_id)
    counts = batch.request_counts
    assert len(failures) == counts.failed == 700 - counts.completed
    assert {failure["error"]["code"] for failure in failures} == {"batch_expired"}
    assert {failure["response"] for failure in failures} == {None}


async def test_ranges_of_a_file(url, client):
    file = await uploaded(client, bytes(range(100)))
    async with client_of(url) as http:

        async def part(value: str) -> httpx.Response:
            return await http.get(f"/v1/files/{file.id}/content", headers={"Range": value})

        for asked, begin, end in (("bytes=10-19", 10, 20), ("bytes=90-", 90, 100), ("bytes=-5", 95, 100)):
            answer = await part(asked)
            assert (answer.status_code, answer.content) == (206, bytes(range(begin, end)))
            assert answer.headers["content-range"] == f"bytes {begin}-{end - 1}/100"
        past = await part("bytes=100-")
        assert (past.status_code, past.headers["content-range"]) == (416, "bytes */100")
        for ignored in ("bytes=1-2,4-5", "bytes=9-1", "lines=1-2"):
            answer = await part(ignored)
            assert (answer.status_code, answer.content) == (200, bytes(range(100)))
        head = await http.head(f"/v1/files/{file.id}/content")
        assert (head.status_code, head.headers["content-length"], head.content) == (200, "100", b"")


async def test_what_one_key_has_does_not_exist_for_another(config, scripted):
    config = attrs.evolve(config, network=NetworkConfig(api_key="one,two"))
    async with asked_by(config, scripted, "one", "two", "three") as (_, (one, two, unknown)):
        batch = await ended(one, await created(one, rows(1)))
        for file_id in (batch.input_file_id, batch.output_file_id):
            await assert_missing(two, file_id, batch.id)
        assert (await two.files.list()).data == []
        assert (await two.batches.list()).data == []
        assert len((await one.files.list()).data) == 2
        with pytest.raises(openai.AuthenticationError):
            await unknown.files.list()


async def test_quotas_are_of_each_key(config, scripted, monkeypatch):
    monkeypatch.setattr(batch_store, "MAX_UNFINISHED", 1)
    batch_config = attrs.evolve(config.batch, max_stored_bytes=3000)
    config = attrs.evolve(config, network=NetworkConfig(api_key="one,two"), batch=batch_config)
    async with asked_by(config, scripted, "one", "two") as (_, (one, two)):
        scripted.gate.clear()
        first = await created(one, rows(1))
        with pytest.raises(openai.PermissionDeniedError, match="unfinished"):
            await created(one, rows(1))
        with pytest.raises(openai.PermissionDeniedError, match="3000 bytes"):
            await uploaded(one, b"x" * 3000)
        await uploaded(two, b"x" * 2000)
        scripted.gate.set()
        await ended(one, first)
        await created(one, rows(1))


LIMITED = """
[limited]
key = "limited-key"
tokens_per_minute = 200
[free]
key = "free-key"
"""


async def test_a_batch_waits_for_the_limits_of_its_key_and_no_other_batch_for_it(
    config, scripted, tmp_path, monkeypatch
):
    """Not a token is computed before it has been saved up for; the wait ends with the batch, or with the limit."""
    monkeypatch.setattr(api_keys, "RECHECK_S", 0.01)
    path = key_file_of(tmp_path, LIMITED)
    config = attrs.evolve(config, network=NetworkConfig(api_keys_file=path))
    async with asked_by(config, scripted, "limited-key", "free-key") as (service, (limited, free)):
        small = await ended(limited, await created(limited, rows(1)))
        assert small.status == "completed"
        waiting, cancelled = [await created(limited, rows(600)) for _ in range(2)]
        done = await ended(free, await created(free, rows(600)))
        assert done.status == "completed"
        tokens = sum(row.tokens for batch in scripted.batches for row in batch.requests)
        assert tokens == done.usage.total_tokens + small.usage.total_tokens
        for batch in (waiting, cancelled):
            now = await limited.batches.retrieve(batch.id)
            assert (now.status, now.usage.total_tokens) == ("in_progress", 0)
        await limited.batches.cancel(cancelled.id)
        assert (await ended(limited, cancelled)).status == "cancelled"
        embedding = await limited.embeddings.create(model="model", input="w3 hello world")  # its own limit is unused
        assert embedding.usage.total_tokens == small.usage.total_tokens
        path.write_text(LIMITED.replace("200", "1000000000"))
        await service.api_keys.load(service.offload)
        waiting = await ended(limited, waiting)
        assert (waiting.status, waiting.request_counts.completed) == ("completed", 600)


async def test_the_api_can_be_switched_off(config, scripted):
    config = attrs.evolve(config, batch=BatchConfig(data_dir=""))
    async with serving(config, scripted) as (_service, client):
        assert (await client.get("/v1/files")).status_code == 404
        assert "/v1/files" not in (await client.get("/openapi.json")).json()["paths"]
