"""Jina's fields of ``/v1/embeddings`` over real sockets; the runner is scripted, so every answer is known."""

import base64

import numpy as np
import pytest

from tests.api.scripted_models import LONG, PROMPTS, Able, array_of, served_as, vector_of
from tests.api.serving import refused, vectors
from tests.conftest import assert_idle
from trio_pool_serve.api.fields.encodings import as_dtype

service = served_as(Able(), prompts=PROMPTS)


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


async def test_long_texts_are_refused_unless_they_may_be_cut(client, service):
    cut = [vector_of(" ".join(LONG.split()[:62]))]
    assert await vectors(client, input=LONG, task=None, truncate=True) == cut
    assert await vectors(client, input=LONG, truncate=True) == cut
    for truncate in (False, None):
        error = await refused(client, input=LONG, task=None, truncate=truncate)
        assert "maximum context length is 64 tokens" in error["message"]
    assert_idle(service)


async def test_inputs_may_say_that_they_are_texts(client):
    expected = [vector_of("hello"), vector_of("world")]
    assert await vectors(client, input=[{"text": "hello"}, {"text": "world"}], task=None) == expected
    assert await vectors(client, input=[{"text": "hello"}, "world"], task=None) == expected
    assert await vectors(client, input={"text": "hello"}, task=None) == expected[:1]
