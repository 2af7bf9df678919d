"""Front ends that ours is compared with give the model the same tokens as ours does, and say who they are."""

import threading
from functools import partial

import pytest
import trio

from benchmarks.frontends import micro_batching, stepwise, synchronous
from benchmarks.frontends.installation import label, put_in_place
from trio_pool_serve.errors import PoolServeError
from trio_pool_serve.prompts import PairPrompt, RenderingParams, TextPrompt
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.threads.offload import Offload

FRONT_ENDS = [synchronous, micro_batching, stepwise]

LONG = "hello world " * 40

ASKED = [
    (TextPrompt("hello w1 w2"), RenderingParams()),
    (TextPrompt(""), RenderingParams()),
    (TextPrompt("hello w1 w2"), RenderingParams(add_special_tokens=False)),
    (TextPrompt("hello w1 w2"), RenderingParams(instruction="query : ")),
    (TextPrompt(LONG), RenderingParams()),
    (TextPrompt(LONG), RenderingParams(truncate_to=10)),
    (TextPrompt(LONG + "w9"), RenderingParams(truncate_to=10, truncation_side="left")),
    (TextPrompt(LONG), RenderingParams(truncate_to=2)),
    (TextPrompt("half a pair: \ud800"), RenderingParams()),
    (PairPrompt("hello", "world"), RenderingParams()),
    *((TextPrompt(f"w{n} " * (n % 7 + 1)), RenderingParams()) for n in range(40)),
]

front_ends = pytest.mark.parametrize("front_end", FRONT_ENDS, ids=lambda module: module.NAME)


async def rendered(render, prompt, params):
    try:
        return (await render(prompt, params)).token_ids.tolist()
    except PoolServeError as error:
        return type(error), str(error)


@front_ends
async def test_texts_become_the_same_tokens_and_errors_as_with_ours(service, front_end):
    renderer = service.model().renderer
    found = {}

    async def one(index: int) -> None:
        found[index] = await rendered(lambda *asked: front_end.render_text(renderer, *asked), *ASKED[index])

    async with trio.open_nursery() as nursery:
        for index in range(len(ASKED)):
            nursery.start_soon(one, index)
    for index, asked in enumerate(ASKED):
        assert found[index] == await rendered(partial(renderer.render_text, client=0), *asked), asked


@front_ends
async def test_a_server_with_another_front_end_says_so(client, front_end, monkeypatch):
    body = {"input": ["hello", "hello world"]}
    ours = await client.post("/v1/embeddings", json=body)
    monkeypatch.setattr(Renderer, "render_plain", Renderer.render_plain)
    monkeypatch.setattr(RequestTimings, "server_timing", RequestTimings.server_timing)
    put_in_place(front_end.NAME, front_end.render_text)
    answer = await client.post("/v1/embeddings", json=body)
    assert label(front_end.NAME) in answer.headers["Server-Timing"]
    assert label(front_end.NAME) not in ours.headers["Server-Timing"]
    assert answer.json()["data"] == ours.json()["data"]


async def test_the_synchronous_front_end_leaves_only_the_engine_off_the_loop(monkeypatch):
    monkeypatch.setattr(Offload, "run", Offload.run)
    synchronous.stay_on_the_loop()
    offload = Offload()
    here = threading.get_ident()
    assert await offload.run("render", threading.get_ident) == here
    assert await offload.run("postprocess", threading.get_ident) == here
    assert await offload.run("postprocess", threading.get_ident, abandon_on_cancel=True) == here
    assert await offload.run("load", threading.get_ident) != here
    assert await offload.run("launch", threading.get_ident, lowers_priority=False) != here
    offload.close()


async def test_texts_that_arrive_together_are_tokenised_together(service, monkeypatch):
    sizes = []
    encode = micro_batching.encode

    def noting(texts, batch):
        sizes.append(len(batch))
        return encode(texts, batch)

    monkeypatch.setattr(micro_batching, "encode", noting)
    renderer = service.model().renderer
    async with trio.open_nursery() as nursery:
        for _ in range(micro_batching.MOST_TEXTS + 1):
            nursery.start_soon(micro_batching.render_text, renderer, TextPrompt("hello"), RenderingParams())
    assert sizes == [micro_batching.MOST_TEXTS, 1]
