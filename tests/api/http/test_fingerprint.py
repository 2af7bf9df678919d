"""The header ``Model-Fingerprint``, and what ``/v1/models`` says of the same."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import httpx

from tests.api.scripted_models import Everything, serve_as
from tests.api.serving import serving
from tests.scripted_runner import ScriptedRunner, described
from trio_pool_serve.config import Config, ModelConfig

HEADER = "model-fingerprint"

COMPUTED: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "hello"},
    "/embeddings": {"input": "hello", "input_type": "query"},
    "/pooling": {"input": "hello", "task": "token_embed"},
    "/classify": {"input": "hello"},
    "/v1/score": {"text_1": "hello", "text_2": "world"},
    "/v1/rerank": {"query": "hello", "documents": ["world"]},
    "/v2/embed": {"texts": ["hello"], "input_type": "search_query", "embedding_types": ["float"], "model": "m"},
    "/v2/rerank": {"query": "hello", "documents": ["world"], "model": "m"},
    "/embed": {"inputs": "hello"},
    "/embed_all": {"inputs": "hello"},
    "/embed_sparse": {"inputs": "hello"},
    "/predict": {"inputs": "hello"},
    "/similarity": {"inputs": {"source_sentence": "hello", "sentences": ["world"]}},
    "/rerank": {"query": "hello", "texts": ["world"]},
    "/invocations": {"input": "hello"},
}


@asynccontextmanager
async def asked(config: Config, runner: ScriptedRunner) -> AsyncIterator[httpx.AsyncClient]:
    named = attrs.evolve(config, loading=attrs.evolve(config.loading, served_model_name="m"))
    async with serving(named, runner) as (service, client):
        serve_as(service, Everything())
        yield client


async def card_of(client: httpx.AsyncClient) -> dict[str, Any]:
    answer = await client.get("/v1/models")
    assert HEADER not in answer.headers
    return answer.json()["data"][0]


async def test_every_response_that_a_model_computed_has_the_fingerprint_of_the_list(config):
    async with asked(config, ScriptedRunner(description=described("0123456789abcdef", "bfloat16"))) as client:
        card = await card_of(client)
        assert (card["dtype"], card["backend"]) == ("bfloat16", "torch")
        assert re.fullmatch("[0-9a-f]{16}", card["fingerprint"])
        told = {path: await client.post(path, json=body) for path, body in COMPUTED.items()}
        for form in ({"stream": True}, {"encoding_format": "bytes"}, {"encoding_format": "base64"}):
            told[str(form)] = await client.post("/v1/embeddings", json={"input": "hello", **form})
        assert {name: answer.status_code for name, answer in told.items()} == dict.fromkeys(told, 200)
        assert {tuple(answer.headers.get_list(HEADER)) for answer in told.values()} == {(card["fingerprint"],)}
        document = (await client.get("/openapi.json")).json()
        assert all(
            "Model-Fingerprint" in document["paths"][path]["post"]["responses"]["200"]["headers"] for path in COMPUTED
        )
        refused = await client.post("/v1/embeddings", json={"input": "hello", "model": "none"})
        assert (refused.status_code, HEADER in refused.headers) == (404, False)


async def test_a_runner_that_says_nothing_of_itself_has_no_fingerprint(config):
    async with asked(config, ScriptedRunner()) as client:
        assert {"fingerprint", "dtype", "backend"}.isdisjoint(await card_of(client))
        assert HEADER not in (await client.post("/v1/embeddings", json={"input": "hello"})).headers


async def test_settings_that_change_inputs_change_the_fingerprint_and_others_do_not(config):
    async def fingerprint(weights: str = "0123456789abcdef", **settings: Any) -> str:
        changed = attrs.evolve(config, loading=ModelConfig(**settings))
        async with asked(changed, ScriptedRunner(description=described(weights))) as client:
            return (await card_of(client))["fingerprint"]

    first = await fingerprint()
    assert await fingerprint(trust_remote_code=True, cache_dir="", revision="main") == first, "a restart"
    others = [
        await fingerprint("fedcba9876543210"),
        await fingerprint(default_prompt="query: "),
        await fingerprint(max_model_len=16),
        await fingerprint(long_text="truncate"),
    ]
    assert len({first, *others}) == 1 + len(others)
