"""Settings that decide what a request means that does not say it: names of models, truncation, prompts."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.scripted_models import Everything, serve_as
from tests.api.serving import post, refused, vectors
from tests.api.serving import serving as serving_scripted
from tests.model_folders import write_json, write_scripted_folder
from tests.scripted_runner import ScriptedRunner
from tests.tables import each
from trio_pool_serve.config import Config, ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.folder import read_model_folder

LONG = "hello " * 100


@asynccontextmanager
async def serving(folder: Path, *, loading: ModelConfig | None = None) -> AsyncIterator[httpx.AsyncClient]:
    config = Config(models=(str(folder),), loading=loading or ModelConfig())
    async with serving_scripted(config, ScriptedRunner()) as (service, client):
        serve_as(service, Everything())
        yield client


@pytest.fixture(scope="module")
def prompted_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two prompt templates, the first of which is its default."""
    folder = write_scripted_folder(tmp_path_factory.mktemp("prompted") / "model")
    declared = {"prompts": {"one": "w1 ", "two": "w2 "}, "default_prompt_name": "one"}
    write_json(folder / "config_sentence_transformers.json", declared)
    return folder


# -- names of models ---------------------------------------------------------------------------------------


async def test_a_model_has_all_of_its_names(scripted_folder):
    loading = ModelConfig(served_model_name="first, second,org/third")
    async with serving(scripted_folder, loading=loading) as client:
        for name in ("first", "second", "org/third", "", None):
            assert (await post(client, input="hello", model=name))["model"] == "first"
        listed = (await client.get("/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == ["first", "second", "org/third"]
        for path in ("/models", "/v1/models/"):
            assert (await client.get(path)).json() == listed
        for slash in ("/", "%2F"):
            assert (await client.get(f"/v1/models/org{slash}third/")).json()["id"] == "org/third"
        error = await refused(client, status=404, input="hello", model="fourth")
        assert error["message"].startswith("The model `fourth` does not exist.")


async def test_a_star_among_the_names_stands_for_all_others(scripted_folder):
    async with serving(scripted_folder, loading=ModelConfig(served_model_name="first,*")) as client:
        for path, name in [("/v1/embeddings", "gpt-4"), ("/invocations", "x"), ("/v1/embeddings", "*")]:
            assert (await post(client, path, input="hello", model=name))["model"] == "first"
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["first"]
        assert (await client.get("/v1/models/*")).status_code == 404


# -- truncation --------------------------------------------------------------------------------------------

SILENT: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": LONG},
    "/pooling": {"input": LONG, "task": "token_embed"},
    "/classify": {"input": LONG},
    "/score": {"text_1": LONG, "text_2": "hello"},
    "/rerank": {"query": "hello", "documents": [LONG]},
    "/v1/rerank": {"query": "hello", "documents": ["hello", LONG]},
}
"""Requests that say nothing about truncation, on routes that refuse long inputs."""

REFUSING: list[tuple[str, dict[str, Any], int]] = [
    ("/embed", {"inputs": LONG, "truncate": False}, 422),
    ("/v2/embed", {"texts": [LONG], "truncate": "NONE"}, 400),
    ("/v1/embeddings", {"input": LONG, "truncation": False}, 400),
    ("/v1/embeddings", {"input": LONG, "truncate": False}, 400),
    ("/v1/rerank", {"query": "hello", "documents": [LONG], "top_k": 1, "truncation": False}, 400),
    ("/v1/multimodalembeddings", {"inputs": [{"content": LONG}], "truncation": False}, 400),
]


@pytest.mark.parametrize("long_text", [None, "refuse", "truncate", "chunk"])
async def test_long_inputs_are_truncated_as_the_setting_says_where_the_request_does_not(scripted_folder, long_text):
    async with serving(scripted_folder, loading=ModelConfig(long_text=long_text)) as client:
        for path, body in SILENT.items():
            answer = await client.post(path, json=body)
            is_served = long_text == "truncate" or (long_text == "chunk" and path == "/v1/embeddings")
            assert answer.status_code == (200 if is_served else 400), (path, answer.text)
        by_tei = await client.post("/embed", json={"inputs": LONG})
        assert by_tei.status_code == (422 if long_text == "refuse" else 200)
        assert (await client.post("/embed", json={"inputs": LONG, "truncate": True})).status_code == 200
        if long_text == "chunk":
            return
        for path, body, status in REFUSING:
            assert (await client.post(path, json=body)).status_code == status, path


# -- prompts -----------------------------------------------------------------------------------------------


@each(
    ("settings", "request_fields", "words"),
    [
        ({}, {}, "w1 hello"),
        ({"default_prompt_name": "two"}, {}, "w2 hello"),
        ({"default_prompt_name": ""}, {}, "hello"),
        ({"default_prompt": "w3 w4 "}, {}, "w3 w4 hello"),
        ({"default_prompt": "w3 w4 "}, {"prompt_name": "two"}, "w2 hello"),
        ({"default_prompt_name": "two"}, {"prompt": ""}, "hello"),
        ({"default_prompt": ""}, {}, "hello"),
    ],
)
async def test_texts_get_the_prompt_that_the_server_or_the_request_chooses(
    prompted_folder, scripted_folder, settings, request_fields, words
):
    async with serving(scripted_folder) as client:
        expected = await vectors(client, input=words)
    async with serving(prompted_folder, loading=ModelConfig(**settings)) as client:
        assert await vectors(client, input="hello", **request_fields) == expected


def test_a_default_prompt_that_the_model_does_not_have_and_names_that_are_the_same_are_refused_at_the_start(
    prompted_folder,
):
    with pytest.raises(ModelLoadError, match="the prompt templates of this model are: one, two"):
        read_model_folder(prompted_folder, ModelConfig(default_prompt_name="three"))
    with pytest.raises(ValueError, match="not both"):
        ModelConfig(default_prompt_name="one", default_prompt="w1 ")
    with pytest.raises(ValueError, match="the same name"):
        Config(models=("m",), loading=ModelConfig(served_model_name="a,a"))
