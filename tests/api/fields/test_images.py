"""Images as inputs over real sockets, good and hostile; the model takes an image for its mean colour."""

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import attrs
import httpx
import pytest
import trio
import trio.testing

from tests.api.scripted_models import Everything, serve_as
from tests.api.serving import post, refused
from tests.api.serving import serving as scripted_server
from tests.conftest import NO_AUTHORITIES, listening, running, until, wait_idle
from tests.rendering.media.image_server import ImageServer, drips, says, serving
from tests.rendering.media.images import GREEN, RED, ColourFormat, data_url, encoded
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.config import Config, InputConfig
from trio_pool_serve.errors import MediaError
from trio_pool_serve.rendering.chat import conversations
from trio_pool_serve.rendering.memory_budget import MAX_CONCURRENT_PREPARATIONS
from trio_pool_serve.service import Service

IMAGE = data_url(encoded())
LOOPBACK = "127.0.0.0/8, ::1"
BASE64 = base64.b64encode(encoded()).decode()


def vector_of(colour) -> list[float]:
    """Three tokens: length, sum, first, last."""
    return [3.0, float(sum(colour)), float(colour[0]), float(colour[-1]), 0.0, 0.0, 0.0, 0.0]


def reads_images(service: Service) -> ColourFormat:
    """Have a running service's model read images."""
    image_format = ColourFormat()
    service.models.find().loaded.renderer.conversations.image_format = image_format
    return image_format


@asynccontextmanager
async def served(config: Config, **settings) -> AsyncIterator[tuple[Service, httpx.AsyncClient]]:
    asked = attrs.evolve(config, input=InputConfig(**settings))
    async with scripted_server(asked, ScriptedRunner()) as (service, client):
        service.media.fetcher.timeout_s = 0.5
        reads_images(service)
        yield service, client


@pytest.fixture
async def images(service: Service) -> ColourFormat:
    return reads_images(service)


async def embed(client: httpx.AsyncClient, path: str = "/v1/embeddings", **body) -> list[list[float]]:
    return [item["embedding"] for item in (await post(client, path, **body))["data"]]


# -- dialects ---------------------------------------------------------------------------------------------


async def test_a_jpeg_is_read_as_a_png_is(client, images):
    (green,) = await embed(
        client, input=data_url(encoded(GREEN, kind="JPEG", quality=100, subsampling=0)), modality="image"
    )
    assert [round(number / 10) for number in green[1:4]] == [round(n / 10) for n in vector_of(GREEN)[1:4]]


def too_many(images: list[dict]) -> list[tuple[str, dict]]:
    """Inputs with those images, as each dialect has them."""
    contents = [{"content": "hello"}, {"content": images}]
    messages = [{"role": "user", "content": images[:1]}, {"role": "user", "content": images[1:]}]
    conversation = {"messages": messages, "chat_template": "hello"}
    return [
        ("/v1/embed", {"inputs": contents}),
        ("/v2/embed", {"inputs": contents, "input_type": "search_document"}),
        ("/v1/multimodalembeddings", {"inputs": contents}),
        ("/v1/embeddings", conversation),
        ("/v1/embeddings", {**conversation, "task": "retrieval.passage"}),
        ("/v1/embeddings", {**conversation, "input_type": "document"}),
        ("/pooling", conversation),
        ("/score", {"text_1": "hello", "text_2": contents}),
        ("/rerank", {"query": contents[1], "documents": ["hello"]}),
    ]


async def test_the_images_of_an_input_are_bounded(config, monkeypatch):
    monkeypatch.setattr(conversations, "MAX_IMAGES", 2)
    image = {"type": "image_url", "image_url": {"url": IMAGE}}
    async with served(config, trust_request_chat_template=True) as (service, client):
        serve_as(service, Everything())
        for path, body in too_many([image] * 3):
            answer = await client.post(path, json=body)
            assert answer.status_code == 400, (path, answer.text)
            assert "3 images; the limit is 2" in answer.text, path
            await wait_idle(service)
        # The processor has seen none of them, and of as many as are allowed it sees all; inputs can have one each.
        assert service.media.cache.statistics().misses == 0
        conversation = [{"role": "user", "content": [image]}, {"role": "user", "content": [image]}]
        await post(client, "/v1/embeddings", messages=conversation, chat_template="hello")
        assert await embed(client, input=[{"image": IMAGE}] * 5) == [vector_of(RED)] * 5


# -- the cache --------------------------------------------------------------------------------------------


async def test_an_image_that_was_asked_for_is_kept_until_all_are_forgotten(client, images, service):
    for _ in range(3):
        await embed(client, input=[{"image": BASE64}, {"image": IMAGE}])
    assert images.processor.calls == 1
    cache = (await client.get("/load")).json()["media_cache"]
    assert cache == {"entries": 1, "bytes": 12, "hits": 5, "misses": 1, "in_flight": 0}
    metrics = (await client.get("/metrics")).text
    assert 'trio_pool_serve_media_cache{of="hits"} 5.0' in metrics
    assert 'trio_pool_serve_media_fetches{of="capacity"} 32.0' in metrics
    answer = await client.post("/reset_mm_cache")
    assert (answer.status_code, answer.json()) == (200, {"status": "cleared"})
    assert (await client.get("/load")).json()["media_cache"]["entries"] == 0
    await embed(client, input={"image": BASE64})
    assert images.processor.calls == 2


# -- hostile input ----------------------------------------------------------------------------------------

NO_ADDRESS = "no address that the server may fetch images from"

HOSTILE = {
    "no image": (data_url(b"hello"), 422, "PNG, JPEG"),
    "nothing": ("data:;base64,", 422, "PNG, JPEG"),
    "a private address": ("http://10.0.0.1/", 422, NO_ADDRESS),
    "another scheme": ("gopher://example.org/", 400, "data:, http:, https: or file:"),
    "a file": ("file:///etc/passwd", 400, "--allowed-media-path"),
}


async def test_hostile_images_are_told_and_the_next_request_is_answered(config):
    answers = {"/image": says(encoded()), "/none": says(b"", status="404 Not Found")}
    async with (
        served(config, allowed_media_domains=f"*, {LOOPBACK}") as (service, client),
        serving(answers) as server,
    ):
        for name, (url, status, told) in {**HOSTILE, "none": (server.url("/none"), 422, "responded with 404")}.items():
            error = await refused(client, status=status, input=["hello", {"image": url}])
            assert (error["param"], told in error["message"]) == ("input", True), (name, error)
            assert await embed(client, input={"image": server.url("/image")}) == [vector_of(RED)]
            await wait_idle(service)
        assert await embed(client, input={"image": data_url(encoded((1, 2, 3), (1, 1)))}) == [vector_of((1, 2, 3))]


async def test_of_two_requests_with_the_same_image_each_is_told_where_its_own_is(client, images, service):
    images.processor.gate.clear()
    places: list[str] = []

    async def one(index: int) -> None:
        asked = ["hello"] * index + [{"image": data_url(encoded((4, 5, 6)))}]
        answer = await client.post("/v1/embeddings", json={"input": asked})
        places.append(answer.json()["error"]["message"].partition(": ")[0])

    images.processor.error = MediaError("too narrow")
    async with trio.open_nursery() as nursery:
        for index in (0, 1):
            nursery.start_soon(one, index)
        await until(lambda: service.media.cache.statistics().hits)
        images.processor.gate.set()
    assert sorted(places) == ["input[0].image", "input[1].image"]


HEAD = b"HTTP/1.1 200 OK\r\n"


async def test_files_are_read_where_they_may_be(config, tmp_path: Path):
    (tmp_path / "image.png").write_bytes(encoded())
    async with served(config, allowed_media_path=tmp_path) as (service, client):
        assert await embed(client, input={"image": (tmp_path / "image.png").as_uri()}) == [vector_of(RED)]
        for name, status in {"../secret.png": 400, "nothing.png": 422}.items():
            await refused(client, status=status, input={"image": f"{tmp_path.as_uri()}/{name}"})
        await wait_idle(service)


async def test_a_client_that_leaves_takes_the_fetching_along(config):
    async with served(config, allowed_media_domains=LOOPBACK) as (service, client):
        async with serving({"/": drips(HEAD, b"A: b\r\n")}) as server:
            await ask_and_leave(client, server)
        await wait_idle(service)


async def ask_and_leave(client: httpx.AsyncClient, server: ImageServer) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: client.post("/v1/embeddings", json={"input": {"image": server.url("/")}}))
        await until(lambda: server.heads)
        nursery.cancel_scope.cancel()


# -- other clients' images --------------------------------------------------------------------------------


def client_from(url: httpx.URL, address: str) -> httpx.AsyncClient:
    """Return a client at an address of its own."""
    transport = httpx.AsyncHTTPTransport(local_address=address, verify=NO_AUTHORITIES)
    return httpx.AsyncClient(base_url=url, timeout=300, transport=transport)


def large_pictures(count: int) -> list[str]:
    """Return pictures of 40 bytes and 9 million pixels each."""
    options = {"size": (3000, 3000), "kind": "WEBP", "lossless": True, "quality": 0, "method": 0}
    return [data_url(encoded((number, 1, 2), **options)) for number in range(count)]


async def test_pictures_of_many_pixels_delay_another_client_s_by_those_that_are_being_decoded(config):
    async with (
        running(Service(config, lambda *_: ScriptedRunner())) as service,
        listening(service) as url,
        client_from(url, "127.0.0.2") as flooding,
        client_from(url, "127.0.0.3") as other,
    ):
        service.media.cache.max_bytes = 0
        images = reads_images(service).processor
        pictures = large_pictures(20)
        assert sum(map(len, pictures)) < 5000
        async with trio.open_nursery() as nursery:
            for part in range(6):
                nursery.start_soon(partial(embed, flooding, input=pictures[part::6], modality="image"))
            with trio.fail_after(60):
                await until(lambda: images.calls >= 2, 60)
                before = images.calls
                assert await embed(other, input=IMAGE, modality="image") == [vector_of(RED)]
            assert images.calls - before <= 1 + 2 * service.offload.media
            nursery.cancel_scope.cancel(reason="the client leaves")
        await wait_idle(service)
        assert images.calls < 20


async def test_no_image_is_decoded_past_its_request_s_deadline(config):
    async with served(config) as (service, client):
        images = reads_images(service).processor
        images.gate.clear()
        body = {"input": [data_url(encoded((number, 1, 2))) for number in range(30)], "modality": "image"}
        answer = await client.post("/v1/embeddings", json=body, headers={"X-Request-Timeout": "1"})
        assert answer.status_code == 504
        images.gate.set()
        await wait_idle(service)
        assert images.calls <= service.offload.media + 1
        assert await embed(client, input=IMAGE, modality="image") == [vector_of(RED)]


# -- memory -----------------------------------------------------------------------------------------------


async def test_images_are_not_prepared_faster_than_they_are_computed(client, service, scripted, images):
    service.memory.max_bytes = 1
    scripted.gate.clear()
    urls = [data_url(encoded((shade, 0, 0))) for shade in range(1, 31)]
    answers = []

    async def ask() -> None:
        answers.extend(await embed(client, input=urls, modality="image"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.to_thread.run_sync(scripted.launching.wait)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert service.memory.held_bytes > 0
        assert service.media.cache.statistics().misses <= 2 * MAX_CONCURRENT_PREPARATIONS
        scripted.gate.set()
    assert answers == [vector_of((shade, 0, 0)) for shade in range(1, 31)]
    assert service.memory.held_bytes == 0


async def test_a_client_that_leaves_holds_no_images(client, service, scripted, images):
    scripted.gate.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: embed(client, input=[IMAGE], modality="image"))
        await trio.to_thread.run_sync(scripted.launching.wait)
        assert service.memory.held_bytes > 0
        nursery.cancel_scope.cancel(reason="the client leaves")
    scripted.gate.set()
    await wait_idle(service)
    assert service.memory.held_bytes == 0
