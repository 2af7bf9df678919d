"""Cancels at every await: a request is followed through the loop and cut off at each of its steps.

Whatever step it is, nothing stays queued, admitted, borrowed or in flight, and the next request is answered.
"""

import base64
from collections.abc import Awaitable, Callable
from ipaddress import ip_network
from pathlib import Path

import attrs
import httpx
import numpy as np
import pytest
import trio

from tests.api.scripted_models import Everything, LateInteraction, serve_as
from tests.conftest import assert_idle, wait_idle
from tests.model_folders import VOCABULARY
from tests.rendering.media.image_server import redirects, says, serving
from tests.rendering.media.images import ColourFormat, data_url, encoded
from tests.rendering.scripted_images import ScriptedFormat, ScriptedLoader
from tests.tensors import ROWS, as_npy
from trio_pool_serve.app import create_app
from trio_pool_serve.config import Config, InputConfig
from trio_pool_serve.prompts import (
    ChatMessage,
    ChatPrompt,
    ContentPrompt,
    EmbedsPrompt,
    ImagePart,
    RenderingParams,
    TextPart,
    TextPrompt,
)
from trio_pool_serve.python_api import AsyncModel, facts_of
from trio_pool_serve.rendering.media.fetching import ImageFetcher
from trio_pool_serve.rendering.memory_budget import Reservation
from trio_pool_serve.rendering.prompt_embeds import EmbedsFormat
from trio_pool_serve.service import Service
from trio_pool_serve.tasks.pool import PoolJob, pool
from trio_pool_serve.tasks.request_context import RequestContext
from trio_pool_serve.tasks.score import ScoreJob, score
from trio_pool_serve.tasks.tokenize import detokenize, tokenize
from trio_pool_serve.types import Client, PoolingRequest, RenderedPrompt


@pytest.fixture
def config(scripted_folder: Path) -> Config:
    return Config(models=(str(scripted_folder),), input=InputConfig(trust_request_chat_template=True))


TEXT = TextPrompt("hello world")
EMBEDS = EmbedsPrompt(base64.b64encode(as_npy(ROWS)))
ROW = PoolingRequest(RenderedPrompt(np.array([7], dtype=np.int32)))


async def embed_in_windows(service: Service) -> None:
    model = attrs.evolve(service.model(), long_text="chunk")
    await pool(model, PoolJob(prompts=[TEXT, TextPrompt("hello " * 200)]), RequestContext())


async def embed_embeddings(service: Service) -> None:
    service.model().renderer.embeds_format = EmbedsFormat(16, 64)
    await pool(service.model(), PoolJob(prompts=[EMBEDS] * 5), RequestContext())


async def score_late_interaction(service: Service) -> None:
    model = service.model()
    folder = attrs.evolve(model.folder, spec=LateInteraction())
    job = ScoreJob(queries=["hello"], documents=["hello", "world", "w1 w2"])
    await score(attrs.evolve(model, folder=folder), job, RequestContext())


async def embed_images(service: Service) -> None:
    conversations = service.model().renderer.conversations
    assert conversations is not None
    conversations.image_format = conversations.image_format or ColourFormat()
    images = [ContentPrompt((ImagePart(data_url(encoded((n, 2, 3)))),)) for n in (1, 2, 1)]
    await pool(service.model(), PoolJob(prompts=[*images, TEXT]), RequestContext())
    service.media.cache.clear()


async def embed_images_of_a_batch(service: Service) -> None:
    """There is room to fetch one at a time."""
    conversations = service.model().renderer.conversations
    conversations.image_format = conversations.image_format or ColourFormat()
    service.media.fetcher.networks = [ip_network("127.0.0.0/8")]
    service.memory.max_bytes = 4 * len(encoded())
    async with serving({"/": says(encoded())}) as server:
        images = [ContentPrompt((ImagePart(server.url("/")),))] * 3
        await pool(service.model(), PoolJob(prompts=images), RequestContext(client=Client(is_background=True)))
    assert service.memory.held_bytes == 0
    service.media.cache.clear()


async def fetch_image(service: Service) -> None:
    async with serving({"/": redirects("/image"), "/image": says(encoded())}) as server:
        fetcher = ImageFetcher(service.offload, 10_000, networks=[ip_network("127.0.0.0/8")])
        fetcher._ssl_context = httpx.create_ssl_context(verify=False)  # so as not to read the authorities each time
        held = Reservation(service.memory, Client())
        try:
            assert await fetcher.fetch(server.url("/"), held)
        finally:
            held.release()
            assert fetcher.turns.statistics().borrowed == fetcher.turns.statistics().waiting == 0


HELLO = ChatMessage("user", (TextPart("hello world"), TextPart("w1")))


async def render_chat(service: Service) -> None:
    for size in (1, 10_000):  # on the loop, and through the threads
        message = ChatMessage("user", (TextPart("hello " * size),))
        prompt = ChatPrompt(messages=(message,), chat_template="{{ messages[0].content }}")
        await service.model().renderer.render(prompt, RenderingParams(truncate_to=8))


async def render_images(service: Service) -> None:
    renderer = service.model().renderer
    loader = ScriptedLoader()
    loader.gate.set()
    seeing = attrs.evolve(renderer.conversations, media=loader, image_format=ScriptedFormat(VOCABULARY["w9"]))
    images = (ImagePart("tokens:2"), ImagePart("tokens:3"))
    prompt = ChatPrompt(messages=(ChatMessage("user", images),), chat_template="hello w9 w9")
    await seeing.render(prompt, RenderingParams(), Client())


INPUTS = b'"input": ["hello", "world", "hello world", "w1", "w2"]'
MESSAGES = b'"messages": [{"role": "user", "content": "hello"}], "chat_template": "{{ messages[0].content }}"'


async def asgi_request(service: Service, more: bytes = b"", asked: bytes = INPUTS) -> None:
    """A request as an ASGI server hands it over; quart's own test client does not survive cancellation."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/embeddings",
        "raw_path": b"/v1/embeddings",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"x"), (b"content-type", b"application/json")],
        "extensions": {},
    }
    to_app, from_client = trio.open_memory_channel[dict](2)
    sent: list[dict] = []

    async def send(message: dict) -> None:
        await trio.lowlevel.checkpoint()
        sent.append(message)

    body = b"{" + asked + more + b"}"
    to_app.send_nowait({"type": "http.request", "body": body, "more_body": False})
    await create_app(service.config, service)(scope, from_client.receive, send)
    assert sent[0]["status"] == 200


def by_python(method: str, *arguments: object) -> Callable[[Service], Awaitable[None]]:
    async def call(service: Service) -> None:
        serve_as(service, Everything())
        await getattr(AsyncModel(**await facts_of(service), service=service), method)(*arguments)

    return call


WORK: dict[str, Callable[[Service], Awaitable[object]]] = {
    "embed in windows": embed_in_windows,
    "embed images": embed_images,
    "embed images of a batch": embed_images_of_a_batch,
    "fetch an image": fetch_image,
    "embed embeddings": embed_embeddings,
    "score by late interaction": score_late_interaction,
    "tokenize": lambda service: tokenize(
        service.model(), ["hello", "world"], RequestContext(), add_special_tokens=True
    ),
    "detokenize": lambda service: detokenize(
        service.model(), [np.array([7, 8])] * 2, RequestContext(), skip_special_tokens=True
    ),
    "render": lambda service: service.model().renderer.render(TEXT, RenderingParams()),
    "render a conversation": render_chat,
    "render content": lambda service: service.model().renderer.render(ContentPrompt(HELLO.parts), RenderingParams()),
    "shorten": lambda service: service.model().renderer.conversations._shorten("hello world w1", 2, Client()),
    "render images": render_images,
    **{
        f"{method} in Python": by_python(method, ["hello world"] * 5)
        for method in ("embed", "tokens", "sparse", "classify")
    },
    **{
        f"{method} in Python": by_python(method, "hello", ["hello", "world", "w1 w2"]) for method in ("score", "rerank")
    },
    "submit": lambda service: service.models.find().engine.submit(ROW),
    "offload": lambda service: service.offload.run("render", lambda: None),
    "wait until ready": lambda service: service.models.find().engine.wait_ready(),
    "a request": asgi_request,
    "a stream": lambda service: asgi_request(service, b', "stream": true'),
    "a conversation": lambda service: asgi_request(service, asked=MESSAGES),
}

# Every step while the loop alone is at work; coarser ones while threads are, until the work is done.
# At the last one it is done, however slow the machine.
STEPS = [*range(60), *range(60, 1000, 20), *range(1000, 10_000, 500), 1_000_000]

ENOUGH_FINISHED = 5
"""So many steps in a row at which the work was done before: the later ones would find nothing to cut off either."""


@pytest.mark.parametrize("what", WORK)
async def test_cancelling_at_any_step_leaves_nothing_behind(service: Service, what: str):
    work, finished, in_a_row = WORK[what], 0, 0
    for step in STEPS:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(work, service)
                for _ in range(step):
                    await trio.lowlevel.checkpoint()
                    if not nursery.child_tasks:
                        break
                scope.cancel(reason=f"step {step}")
        finished += not scope.cancelled_caught
        in_a_row = 0 if scope.cancelled_caught else in_a_row + 1
        await wait_idle(service)
        if in_a_row == ENOUGH_FINISHED:
            break
    await work(service)
    assert_idle(service)
    assert 0 < finished < STEPS.index(step) + 1
