"""Late chunking in both dialects over real sockets; the runner is scripted, so every vector is known."""

import json

import numpy as np
import pytest
import trio

from tests.api.scripted_models import PROMPTS, Chunkable, become, served_as
from tests.api.serving import post, refused, serving, vectors
from tests.conftest import assert_idle, wait_idle
from tests.model_folders import VOCABULARY
from tests.scripted_runner import ScriptedRunner, scripted_vector
from trio_pool_serve.config import Config, ModelConfig
from trio_pool_serve.rendering.text.chunk_tokens import MAX_OVERLAP
from trio_pool_serve.types import EmbedChunks

CHUNKS = ["hello ", "world w1", " w2"]
TEXT = "hello world w1 w2"
SPANS = [[0, 6], [6, 14], [14, 17]]
IDS = [["[CLS]", "hello"], ["world", "w1"], ["w2", "[SEP]"]]


service = served_as(Chunkable(), prompts=PROMPTS)


def vector_of(*words: str) -> list[float]:
    return scripted_vector(np.array([VOCABULARY[word] for word in words], dtype=np.int32), 8).tolist()


EXPECTED = [vector_of(*words) for words in IDS]

BOTH = {"late_chunking": {"input": CHUNKS, "late_chunking": True}, "chunks": {"input": TEXT, "chunks": SPANS}}


@pytest.mark.parametrize("body", BOTH.values(), ids=BOTH)
async def test_a_document_is_one_row_and_its_tokens_are_counted_once(client, service, scripted, body):
    answer = await post(client, **body)
    assert [item["embedding"] for item in answer["data"]] == EXPECTED
    assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6, "completion_tokens": 0}
    ((request,),) = [batch.requests for batch in scripted.batches]
    assert request.params == (EmbedChunks(),)
    assert request.prompt.chunks.tolist() == [[0, 2], [2, 4], [4, 6]]
    assert_idle(service)


@pytest.mark.parametrize("body", BOTH.values(), ids=BOTH)
async def test_vectors_of_chunks_are_bytes_as_any_others(client, body):
    raw = await client.post("/v1/embeddings", json={"encoding_format": "bytes", **body})
    assert np.frombuffer(raw.content, np.float32).reshape(3, 8).tolist() == EXPECTED
    assert [item["index"] for item in json.loads(raw.headers["metadata"])["data"]] == [0, 1, 2]


async def test_each_chunk_is_normalised_or_not(client, scripted):
    await vectors(client, normalized=False, **BOTH["late_chunking"])
    assert scripted.batches[-1].requests[0].params == (EmbedChunks(normalize=False),)


@pytest.mark.parametrize("body", BOTH.values(), ids=BOTH)
async def test_a_stream_has_an_event_for_each_chunk(client, body):
    lines = (await client.post("/v1/embeddings", json={"stream": True, **body})).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert [(event["index"], event["embedding"]) for event in events[:-1]] == [*enumerate(EXPECTED)]
    assert events[-1]["usage"]["prompt_tokens"] == 6


LONG = [f"w{n} " for n in range(100)]


async def test_a_document_that_is_too_long_is_refused(client, service):
    answer = await refused(client, input=LONG, late_chunking=True)
    assert answer["message"].startswith("input has 102 tokens. This model's maximum context length is 64 tokens.")
    assert answer["param"] == "input"
    assert_idle(service)


async def test_chunks_in_the_tail_that_truncating_drops_are_refused(client):
    error = await refused(client, input=LONG, late_chunking=True, truncate=True)
    assert error["message"].startswith("Chunk 62, characters 238 to 242 of the document, has no tokens")
    assert error["param"] == "late_chunking"


async def test_windows_of_long_texts_are_not_for_documents(scripted_folder, scripted: ScriptedRunner):
    config = Config(models=(str(scripted_folder),), loading=ModelConfig(long_text="chunk"))
    async with serving(config, scripted) as (service, client):
        become(service, Chunkable())
        assert "maximum context length" in (await refused(client, input=LONG, late_chunking=True))["message"]
        assert await vectors(client, input=CHUNKS, late_chunking=True) == EXPECTED


async def test_overlapping_chunks_have_a_bound_together(client, scripted):
    text = " ".join(f"w{n}" for n in range(60))
    within = [[0, len(text)]] * MAX_OVERLAP
    assert len(await vectors(client, input=text, chunks=within)) == MAX_OVERLAP
    error = await refused(client, input=text, chunks=[*within, [0, 2]])
    assert error["message"].startswith(
        f"The chunks have {62 * MAX_OVERLAP + 2} tokens together; the limit is {MAX_OVERLAP} times"
    )
    assert error["param"] == "chunks"
    assert len(scripted.batches) == 1


async def test_a_document_that_is_cancelled_leaves_nothing_behind(client, service, scripted):
    scripted.gate.clear()
    body = {"input": CHUNKS, "late_chunking": True}
    answer = await client.post("/v1/embeddings", json=body, headers={"X-Request-Timeout": "0.05"})
    assert answer.status_code == 504
    with trio.move_on_after(0.05):
        await client.post("/v1/embeddings", json=body)
    scripted.gate.set()
    await wait_idle(service)
    assert await vectors(client, **body) == EXPECTED
