"""``stream: true``: vectors as server-sent events, in the order in which they are finished."""

import json
import threading

import httpx
import trio

from tests.api.scripted_models import vector_of
from tests.api.serving import post
from tests.conftest import assert_idle, until, wait_idle
from trio_pool_serve.service import Service
from trio_pool_serve.types import Batch


def events_of(text: str) -> list:
    """The objects of a stream; its end must be marked."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def stream(client: httpx.AsyncClient, **body) -> list:
    answer = await client.post("/v1/embeddings", json={"stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.text)


async def test_each_vector_is_an_event_and_the_usage_comes_last(client, service):
    *items, usage = await stream(client, input=["hello", "hello world", ""])
    plain = await post(client, input=["hello", "hello world", ""])
    assert sorted(items, key=lambda item: item["index"]) == plain["data"]
    assert usage["usage"] == plain["usage"] == {"prompt_tokens": 9, "total_tokens": 9, "completion_tokens": 0}
    assert usage["model"] == plain["model"]
    assert_idle(service)


async def test_a_vector_is_sent_while_others_are_still_computed(service, scripted, client):
    """The first batch's event arrives while the second batch is held up."""
    second_may_go = threading.Event()

    def hold(batch: Batch) -> None:
        if len(scripted.batches) > 1:
            second_may_go.wait(60)

    scripted.on_launch = hold
    body = {"input": [[7] * 40, [9] * 40], "stream": True}
    async with client.stream("POST", "/v1/embeddings", json=body) as answer:
        chunks = answer.aiter_text()
        first = json.loads((await anext(chunks)).removeprefix("data: ").strip())
        assert first["embedding"] == vector_of(body["input"][first["index"]])
        assert service.models.find().engine.statistics().in_flight_batches == 1
        second_may_go.set()
        rest = "".join([chunk async for chunk in chunks])
    assert len(events_of(rest)) == 2
    assert_idle(service)


async def test_a_client_that_leaves_takes_its_rows_along(service, scripted, client):
    scripted.gate.clear()
    async with client.stream("POST", "/v1/embeddings", json={"input": [[7] * 40] * 20, "stream": True}) as answer:
        assert answer.status_code == 200
        await trio.to_thread.run_sync(scripted.launching.wait)
    await until(lambda: not service.models.find().engine.statistics().queued_rows)
    scripted.gate.set()
    await wait_idle(service)
    assert len(scripted.batches) < 20


async def test_what_goes_wrong_later_is_the_last_event(client, service):
    *_, error = await stream(client, input=["hello", "hello " * 100])
    assert error["error"]["type"] == "BadRequestError"
    assert "102 tokens" in error["error"]["message"]
    await wait_idle(service)


async def test_a_batch_that_fails_is_the_last_event(client, service, scripted):
    def fail(batch: Batch) -> None:
        raise ValueError("secret")

    scripted.on_launch = fail
    (error,) = await stream(client, input="hello")
    assert error["error"]["code"] == 500
    assert "secret" not in json.dumps(error)
    await wait_idle(service)


async def test_the_deadline_is_the_streams_too(client, service, scripted):
    scripted.gate.clear()
    answer = await client.post(
        "/v1/embeddings", json={"input": "hello", "stream": True}, headers={"X-Request-Timeout": "0.05"}
    )
    scripted.gate.set()
    (error,) = events_of(answer.text)
    assert error["error"]["code"] == 504
    await wait_idle(service)


def requests_and_seconds(service: Service) -> list[float]:
    """Count and sum of the histogram of requests."""
    (family,) = service.metrics.total.collect()
    return [sample.value for sample in family.samples if sample.name.endswith(("_count", "_sum"))]


async def test_a_stream_counts_as_running_and_as_long_as_it_takes(client, service, scripted):
    """``/load`` counts a stream until its end, and the histogram of requests has all of its time."""
    at_least_s = 0.2
    scripted.gate.clear()
    began = trio.current_time()
    async with client.stream("POST", "/v1/embeddings", json={"input": [[7] * 40], "stream": True}) as answer:
        assert (await client.get("/load")).json()["server_load"] == 1
        assert requests_and_seconds(service) == [0, 0]
        await trio.sleep(at_least_s)  # from a moment at which the request has been running
        scripted.gate.set()
        await answer.aread()
    await until(lambda: service.running_tasks == 0)
    count, seconds = requests_and_seconds(service)
    assert count == 1
    assert at_least_s <= seconds <= trio.current_time() - began + 0.01  # of the arrival, Linux tells its tick


async def test_a_stream_whose_client_leaves_no_longer_counts_as_running(client, service, scripted):
    """As a request that is cancelled, it is not in the histogram of requests."""
    scripted.gate.clear()
    async with client.stream("POST", "/v1/embeddings", json={"input": [[7] * 40], "stream": True}):
        assert service.running_tasks == 1
    await until(lambda: service.running_tasks == 0)
    scripted.gate.set()
    await wait_idle(service)
    assert requests_and_seconds(service) == [0, 0]
