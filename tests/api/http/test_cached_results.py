"""The cache of results over real sockets: what requests and operators see of it."""

import re
from pathlib import Path

import attrs
import httpx
import pytest
import trio

from tests.api.scripted_models import Able, become
from tests.api.serving import serving
from tests.conftest import make_slow, running, until, wait_idle
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.config import Config, ProcessesConfig, SchedulingConfig
from trio_pool_serve.engine.planned_window import PlannedWindow
from trio_pool_serve.prompts import TextPrompt
from trio_pool_serve.service import Service
from trio_pool_serve.tasks.pool import PoolJob, pool
from trio_pool_serve.tasks.request_context import RequestContext
from trio_pool_serve.telemetry.timings import RequestTimings

CACHED = SchedulingConfig(result_cache_bytes=2**20, max_queue_s=600)
WORDS = [f"w{n}" for n in range(10)]


@pytest.fixture
def config(scripted_folder: Path) -> Config:
    return Config(models=(str(scripted_folder),), scheduling=CACHED)


async def embed(client: httpx.AsyncClient, texts: list[str], **fields) -> tuple[list, str | None]:
    """Return the vectors, and what ``Server-Timing`` says of the cache."""
    answer = await client.post("/v1/embeddings", json={"input": texts, **fields})
    assert answer.status_code == 200, answer.text
    found = re.search(r'cache;desc="(\d+/\d+)"', answer.headers["server-timing"])
    assert ("cache" in answer.headers["server-timing"]) == (found is not None)
    return [item["embedding"] for item in answer.json()["data"]], found and found[1]


def computed(runner: ScriptedRunner) -> int:
    return sum(runner.rows)


async def test_every_task_and_encoding_has_the_same_answer_from_the_cache(config, scripted):
    async with serving(config, scripted) as (service, client):
        become(service, Able())
        hits = {}
        encodings = [{}, {"encoding_format": "base64"}, {"embed_dtype": "int8"}, {"dimensions": 3}, {"stream": True}]
        for path, body in (
            *(("/v1/embeddings", {"input": WORDS, **fields}) for fields in encodings),
            ("/v1/embeddings", {"input": [[5, 6], [7]]}),
            ("/rerank", {"query": "w1 w2", "documents": ["w1", "w2 w3", "hello"]}),
            ("/score", {"text_1": "w1 w2", "text_2": ["w1", "w2 w3", "hello"]}),
            ("/classify", {"input": WORDS}),
            ("/pooling", {"input": WORDS, "tasks": ["embed", "classify"]}),
        ):
            first, second = [await client.post(path, json=body) for _ in range(2)]
            hits[path] = service.results.statistics().hits
            if path == "/v1/embeddings" and "stream" not in body:
                assert f'cache;desc="{len(body["input"])}/' in second.headers["server-timing"]
            texts = [re.sub(r'"(id|created)":[^,]+,', "", answer.text) for answer in (first, second)]
            if "stream" in body:  # events come in the order in which rows are finished
                texts = [sorted(text.split("\n")) for text in texts]
            assert texts[0] == texts[1], body
        of_tasks = hits["/pooling"] - hits["/v1/embeddings"]
        assert of_tasks == 2 * len(WORDS) + 3, "queries are looked up, documents that are scored against them are not"
        await wait_idle(service)


async def test_other_fields_and_other_models_are_other_rows(config, scripted):
    two = attrs.evolve(config, models=(f"a={config.models[0]}", f"b={config.models[0]}"))
    async with serving(two, scripted) as (_, client):
        for known in ("0/2", "2/2"):
            for fields in ({}, {"dimensions": 3}, {"normalize": False}, {"prompt": "w9 "}, {"model": "b"}):
                assert (await embed(client, WORDS[:2], **fields))[1] == known, fields


async def test_known_rows_refuse_no_other_request_before_they_are_looked_up(config, scripted):
    """At rates that were measured when the machine was busy, and are not measured again while nothing is computed."""
    config = attrs.evolve(config, scheduling=attrs.evolve(CACHED, max_queue_s=5.0))
    long = [" ".join(f"w{n + row}" for n in range(60)) for row in range(4)]  # tokenised in a thread
    async with serving(config, scripted) as (service, client):
        for _ in range(60):
            await embed(client, long)
        make_slow(service)
        known: list[str | None] = []

        async def ask() -> None:
            known.append((await embed(client, long))[1])

        async with trio.open_nursery() as clients:
            for _ in range(12):
                clients.start_soon(ask)
        assert known == ["4/4"] * 12
        scripted.gate.clear()
        async with trio.open_nursery() as clients:
            clients.start_soon(embed, client, ["w199"])
            await until(lambda: service.models.find().engine.statistics().admitted_tokens >= 3)
            refused = await client.post("/v1/embeddings", json={"input": long})
            assert refused.status_code == 429, "what its client has waiting counts all the same"
            scripted.gate.set()


async def test_operators_see_what_it_holds_and_how_often_it_helped(config, scripted):
    entry = 512 + 128 + 8 * 4
    config = attrs.evolve(config, scheduling=attrs.evolve(CACHED, result_cache_bytes=5 * entry))
    async with serving(config, scripted) as (service, client):
        await embed(client, WORDS[:4])
        await embed(client, WORDS[2:8])
        expected = {"entries": 5, "bytes": 5 * entry, "hits": 2, "misses": 8, "evictions": 3}
        assert (await client.get("/load")).json()["result_cache"] == expected
        metrics = (await client.get("/metrics")).text
        for of, value in expected.items():
            assert f'trio_pool_serve_result_cache{{of="{of}"}} {float(value)}' in metrics
        tokens = re.search(r"trio_pool_serve_tokens_total\{.*\} (\S+)", metrics)
        assert tokens
        assert float(tokens[1]) == 3 * 8, "tokens that were not computed are counted"
        served = service.models.find().loaded
        assert served is not None
        served.results.clear()
        assert (await client.get("/load")).json()["result_cache"]["entries"] == 0


async def test_it_is_off_by_default(scripted_folder, scripted):
    async with serving(Config(models=(str(scripted_folder),)), scripted) as (service, client):
        assert service.models.find().loaded is not None
        assert service.models.find().loaded.results is None
        for _ in range(2):
            assert (await embed(client, WORDS))[1] is None
        assert computed(scripted) == 20
        assert set((await client.get("/load")).json()["result_cache"].values()) == {0}


def test_each_api_process_has_its_part(config, scripted, tmp_path):
    config = attrs.evolve(config, processes=ProcessesConfig(api_workers=4, engine="process"))
    service = Service(config, lambda *_: scripted, socket_folder=tmp_path)
    assert service.results.max_bytes == 2**18


async def test_a_request_with_a_salt_shares_no_outputs(config, scripted):
    async with serving(config, scripted) as (service, client):
        become(service, Able())
        for path, body in {
            "/v1/embeddings": {"input": WORDS},
            "/pooling": {"input": WORDS, "task": "embed"},
            "/classify": {"input": WORDS},
            "/rerank": {"query": "w1", "documents": WORDS},
            "/v1/rerank": {"query": "w1", "documents": WORDS, "top_k": 1},
            "/v2/rerank": {"query": "w1", "documents": WORDS},
            "/score": {"text_1": "w1", "text_2": WORDS},
        }.items():
            for salts in ({}, {"cache_salt": "mine"}, {"cache_salt": "mine"}, {"cache_salt": ""}):
                rows, entries = computed(scripted), service.results.statistics().entries
                assert (await client.post(path, json={**body, **salts})).status_code == 200
                if salts:
                    assert computed(scripted) >= rows + len(WORDS), path
                    assert service.results.statistics().entries == entries, path
        _, known = await embed(client, WORDS, cache_salt=None)
        assert known == "10/10"
        await wait_idle(service)


async def test_background_work_is_computed_each_time(config, scripted):
    async with running(Service(config, lambda *_: scripted)) as service:
        model = service.model()
        for _ in range(2):
            timings = RequestTimings()
            with PlannedWindow(1).members[0] as member:
                job = PoolJob(prompts=[TextPrompt(word) for word in WORDS])
                await pool(attrs.evolve(model, window=member), job, RequestContext(timings=timings))
            assert timings.looked_up == 0
        assert computed(scripted) == 20
        assert service.results.statistics().entries == 0
