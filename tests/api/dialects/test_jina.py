"""Jina's fields of ``/v1/embeddings`` over real sockets; the runner is scripted, so every answer is known."""

import base64

import httpx
import numpy as np
import pytest

from tests.api.scripted_models import LONG, Able, array_of, become, vector_of
from tests.api.serving import post, vectors
from tests.conftest import assert_idle, wait_idle
from tests.tables import each
from trio_pool_serve.api.fields.encodings import as_dtype
from trio_pool_serve.service import Service
from trio_pool_serve.types import Embed


@pytest.fixture
async def service(service: Service) -> Service:
    become(service, Able())
    return service


async def refused(client: httpx.AsyncClient, status: int = 400, **body) -> dict:
    answer = await client.post("/v1/embeddings", json=body)
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    return answer.json()["error"]


async def test_an_answer_is_openai_s(client, config):
    answer = await post(client, input=["hello"], task="text-matching", model=None)
    assert answer["object"] == "list"
    assert answer["model"] == config.models[0]
    assert answer["data"] == [{"index": 0, "object": "embedding", "embedding": vector_of("hello")}]
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3, "completion_tokens": 0}


@pytest.mark.parametrize(
    ("task", "read"),
    [
        ("retrieval.query", "query : hello"),
        ("retrieval.passage", "passage : hello"),
        ("classification", "hello hello"),
        ("code.query", "world hello"),
        ("code.passage", "hello"),
        ("text-matching", "hello"),
        ("separation", "hello"),
        (None, "hello"),
    ],
)
async def test_texts_are_read_for_their_task(client, task, read):
    assert await vectors(client, input="hello", task=task) == [vector_of(read)]


async def test_a_prompt_that_the_client_has_chosen_itself_stays(client):
    assert await vectors(client, input="hello", task="classification", prompt="w1 ") == [vector_of("w1 hello")]


@pytest.mark.parametrize("listed", [False, True], ids=["alone", "in a list"])
async def test_embedding_type_chooses_the_encoding(client, listed):
    vector = array_of("hello")

    async def one(name: str) -> object:
        (found,) = await vectors(client, input="hello", embedding_type=[name] if listed else name)
        return found

    assert await one("float") == vector.tolist()
    assert await one("binary") == as_dtype(vector, "binary").tolist()
    assert await one("ubinary") == as_dtype(vector, "ubinary").tolist()
    assert np.frombuffer(base64.b64decode(await one("base64")), "<f4").tolist() == vector.tolist()


async def test_openai_s_fields_hold_beside_them(client):
    marked = {"task": None}
    assert await vectors(client, input="hello", dimensions=3, **marked) == [vector_of("hello", 3)]
    expected = as_dtype(array_of("hello"), "int8").tolist()
    assert await vectors(client, input="hello", embed_dtype="int8", **marked) == [expected]
    assert await vectors(client, input=LONG, truncate=True, truncate_prompt_tokens=4, **marked) == [vector_of("w0 w1")]
    assert await vectors(client, input=[[7, 8]], **marked) == [vector_of([7, 8])]


async def test_normalized_is_what_the_model_is_asked_for(client, scripted):
    for asked, expected in (
        ({"normalized": True}, True),
        ({"normalized": False}, False),
        ({"normalized": "true"}, True),
        ({"normalized": 0}, False),
        ({"normalized": None, "normalize": True}, True),
        ({"normalized": None}, None),
    ):
        await vectors(client, input="hello", **asked)
        assert scripted.batches[-1].requests[0].params == (Embed(normalize=expected),)


async def test_long_texts_are_refused_unless_they_may_be_cut(client, service):
    cut = [vector_of(" ".join(LONG.split()[:62]))]
    assert await vectors(client, input=LONG, task=None, truncate=True) == cut
    assert await vectors(client, input=LONG, truncate=True) == cut
    for truncate in (False, None):
        assert (
            "maximum context length is 64 tokens"
            in (await refused(client, input=LONG, task=None, truncate=truncate))["message"]
        )
    assert_idle(service)


async def test_inputs_may_say_that_they_are_texts(client):
    expected = [vector_of("hello"), vector_of("world")]
    assert await vectors(client, input=[{"text": "hello"}, {"text": "world"}], task=None) == expected
    assert await vectors(client, input=[{"text": "hello"}, "world"], task=None) == expected
    assert await vectors(client, input={"text": "hello"}, task=None) == expected[:1]


async def test_infinity_s_modality_is_text_unless_it_says_image(client):
    for modality in ("text", None):
        assert await vectors(client, input="hello", modality=modality) == [vector_of("hello")]
    assert (await refused(client, input="hello", modality="image"))["message"] == "This model reads texts only."
    for modality in ("audio", "smell"):
        assert (await refused(client, input="hello", modality=modality))["param"] == "modality"


WRONG = {
    "input null": ({"input": None}, "input"),
    "no input": ({"input": []}, "input"),
    "an image": ({"input": [{"image": "https://example.org/a.png"}]}, "input"),
    "an image alone": ({"input": {"image": "https://example.org/a.png"}}, "input"),
    "an image among texts": ({"input": ["a", {"text": "b"}, {"image": "c"}]}, "input"),
    "an empty image": ({"input": {"image": ""}}, "input"),
    "an image that is a number": ({"input": {"image": 5}}, "input"),
    "an image and ids": ({"input": [{"image": "https://example.org/a.png"}, [5]]}, "input"),
    "ids for images": ({"input": [5], "modality": "image"}, "input"),
    "no image": ({"input": [], "modality": "image"}, "input"),
    "too many images": ({"input": ["a"] * 2049, "modality": "image"}, "input"),
    "an input of nothing": ({"input": [{}]}, "input"),
    "a text that is a number": ({"input": [{"text": 5}]}, "input"),
    "texts and ids": ({"input": [{"text": "a"}, 5]}, "input"),
    "late chunking": ({"input": "a", "late_chunking": True}, "late_chunking"),
    "late chunking in a string": ({"input": "a", "late_chunking": "true"}, "late_chunking"),
    "settings for late chunking": ({"input": "a", "late_chunking_params": {"size": 5}}, "late_chunking_params"),
    "an unknown type": ({"input": "a", "embedding_type": "int4"}, "embedding_type"),
    "several types": ({"input": "a", "embedding_type": ["float", "binary"]}, "embedding_type"),
    "no type": ({"input": "a", "embedding_type": []}, "embedding_type"),
    "bits of 3": ({"input": "a", "embedding_type": "binary", "dimensions": 3}, "embedding_type"),
    "dimensions 9": ({"input": "a", "dimensions": 9}, "dimensions"),
}


@each(("body", "param"), WRONG.values(), ids=WRONG)
async def test_bad_input_is_400_and_names_the_field(client, service, body, param):
    error = await refused(client, **{"task": None, **body})
    assert error["type"] == "BadRequestError"
    assert error["param"] == param
    await wait_idle(service)
