"""Lines of batches are responded to as requests over HTTP are."""

import json

import attrs
import httpx
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.api.fields.test_images import LOOPBACK, reads_images, served
from tests.api.scripted_models import Everything, serve_as
from tests.api.serving import serving
from tests.conftest import reserving, until
from tests.rendering.media.image_server import says
from tests.rendering.media.image_server import serving as image_server
from tests.rendering.media.images import RED, encoded
from trio_pool_serve.access.api_keys import KeyUsage
from trio_pool_serve.api.dialects import DIALECTS, INVOCATIONS
from trio_pool_serve.api.dialects.openai import OPENAI
from trio_pool_serve.api.http.line_responder import LineResponder
from trio_pool_serve.api.http.route_table import RouteTable
from trio_pool_serve.api.http.task_handler import task_routes
from trio_pool_serve.errors import UnavailableError
from trio_pool_serve.runs.requests.line_results import LineRequest, Submitter
from trio_pool_serve.service import Service
from trio_pool_serve.types import Client

LINES = [
    ("/v1/embeddings", {"input": ["a", "b c"]}),
    ("/embed", {"inputs": "a"}),
    ("/v1/embeddings", {"input": []}),
    ("/embed", {"inputs": ""}),
    ("/v1/embeddings", {"input": "a", "model": "other"}),
    ("/v1/nothing", {"input": "a"}),
    ("/v1/embeddings", {"input": "a", "encoding_format": "bytes"}),
    ("/v1/embeddings", {"input": "a", "stream": True}),
]


def responder_of(service: Service) -> LineResponder:
    return LineResponder(service, RouteTable(task_routes(service, DIALECTS, INVOCATIONS)), OPENAI)


def requests_of(lines: list[tuple[str, dict]]) -> list[LineRequest]:
    return [LineRequest(path, json.dumps(body).encode(), f"r{n}", 7) for n, (path, body) in enumerate(lines)]


async def test_a_line_has_the_response_that_a_request_has(service: Service, client: httpx.AsyncClient):
    responses = await responder_of(service).respond_all(requests_of(LINES), Submitter())
    for (path, body), response in list(zip(LINES, responses, strict=True))[:-3]:
        over_http = await client.post(path, json=body)
        assert response.status == over_http.status_code, (path, body)
        found, expected = json.loads(response.body), over_http.json()
        if response.status == 200 and isinstance(found, dict):
            assert found.pop("created") == 7
            assert found.pop("id") == f"embd-r{LINES.index((path, body))}"
            del expected["created"], expected["id"]
        assert found == expected
    assert [response.status for response in responses[-3:]] == [404, 400, 400]


async def test_a_line_names_its_model_as_a_request_does(config, scripted):
    config = attrs.evolve(config, models=(f"first={config.models[0]}", f"second={config.models[0]}"))
    lines = [
        ("/v1/embeddings", {"input": "a", "model": "second-query"}),
        ("/api/embed", {"input": "a", "model": "second:latest"}),
        ("/v2/models/second/infer", {"inputs": []}),  # the model of a line is in its body
    ]
    async with serving(config, scripted) as (service, _):
        responder = responder_of(service)
        responses = await responder.respond_all(requests_of(lines), Submitter())
        assert [path for path in responder.paths if "{" in path] == []
    assert [response.status for response in responses] == [200, 200, 404]
    assert [json.loads(response.body)["model"] for response in responses[:2]] == ["second", "second:latest"]


async def test_other_requests_have_their_turn_between_the_lines(service: Service):
    """As many turns as there are lines: not one after all of them."""
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count_turns)
        responder = responder_of(service)
        lines = requests_of([("/nothing", {})] * 50)  # which wait for nothing by themselves
        assert {response.status for response in await responder.respond_all(lines, Submitter())} == {404}
        nursery.cancel_scope.cancel()
    assert turns >= 50


IMAGE_BYTES = 50_000


async def test_images_wait_for_those_of_their_own_batch_and_each_is_fetched_once(config):
    """The 120 lines have four times the memory that a client may have, and while nothing is prepared some must wait."""
    images = {f"/{number}": says(encoded(RED).ljust(IMAGE_BYTES, b"\0")) for number in range(120)}
    async with served(config, allowed_media_domains=LOOPBACK) as (service, _), image_server(images) as server:
        service.memory.max_bytes = 120 * IMAGE_BYTES // 2
        gate = reads_images(service).processor.gate
        gate.clear()
        lines = [("/v1/embeddings", {"input": server.url(path), "modality": "image"}) for path in images]
        windows = [requests_of(lines[at : at + 40]) for at in (0, 40, 80)]
        responses = []

        async def respond(window: list[LineRequest]) -> None:
            responses.extend(await responder_of(service).respond_all(window, Submitter()))

        async with trio.open_nursery() as nursery:
            for window in windows:
                nursery.start_soon(respond, window)
            await until(lambda: service.memory.fetched.total() >= 15 * IMAGE_BYTES)
            assert len(server.heads) <= 30, "as many as a client may have"
            gate.set()
        assert [response.status for response in responses] == [200] * 120
        assert len(server.heads) == 120
        assert service.memory.held_bytes == 0


async def test_a_line_whose_images_alone_are_too_large_is_refused_and_the_others_are_not(config):
    images = {"/0": says(encoded(RED)), "/1": says(encoded(RED).ljust(IMAGE_BYTES, b"\0"))}
    async with served(config, allowed_media_domains=LOOPBACK) as (service, _), image_server(images) as server:
        service.memory.max_bytes = IMAGE_BYTES
        lines = [("/v1/embeddings", {"input": server.url(f"/{n % 2}"), "modality": "image"}) for n in range(6)]
        responses = await responder_of(service).respond_all(requests_of(lines), Submitter())
    assert [response.status for response in responses] == [200, 422] * 3
    assert b"together larger than 25000 bytes" in responses[1].body


async def test_vectors_of_tokens_are_computed_however_much_of_the_memory_a_batch_takes(service: Service):
    """Three windows at a time, each of whose lines hold as much as one client may have."""
    serve_as(service, Everything())
    service.memory.max_bytes = 2 * 18 * 8 * 4  # of 18 vectors of 8 numbers
    lines = requests_of([("/pooling", {"task": "token_embed", "input": "hello " * 16})] * 40)
    statuses = []

    async def respond() -> None:
        responses = await responder_of(service).respond_all(lines, Submitter())
        statuses.extend(response.status for response in responses)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(respond)
    assert statuses == [200] * 120
    assert service.memory.held_bytes == 0


async def test_memory_that_others_hold_is_no_fault_of_a_window_whose_tokens_count_once(service: Service):
    usage = KeyUsage()
    usage.tokens.resize(1000, trio.current_time())
    lines = requests_of([("/v1/embeddings", {"input": "a"}), ("/v1/embeddings", {"input": "a " * 16_000})])
    submitter = Submitter(Client("one", is_background=True), usage=usage)
    with reserving(service.memory, Client("other")) as reservation:
        service.memory.add(reservation.client, service.memory.max_bytes)
        with pytest.raises(UnavailableError):
            await responder_of(service).respond_all(lines, submitter)
        service.memory.add(reservation.client, -service.memory.max_bytes)
    assert usage.tokens.used == 0
    responses = await responder_of(service).respond_all(lines, submitter)
    assert 429 not in [response.status for response in responses]
    assert usage.tokens.used == pytest.approx(sum(response.tokens for response in responses), abs=1)
    assert usage.tokens.used > 0


async def test_a_cancelled_window_leaves_nothing_behind(service: Service, scripted):
    scripted.gate.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(responder_of(service).respond_all, requests_of(LINES), Submitter())
        await trio.to_thread.run_sync(scripted.launching.wait)
        await wait_all_tasks_blocked()
        assert service.running_tasks == 0, "lines are not requests"
        assert service.models.find().engine.statistics().in_flight_batches == 1
        nursery.cancel_scope.cancel()
    scripted.gate.set()
    assert not service.models.find().engine.queue.scheduler.planned
    assert service.models.find().engine.statistics().queued_rows == 0
