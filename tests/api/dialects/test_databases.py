"""What Weaviate's modules and Elasticsearch's inference service send, over real sockets; the runner is scripted."""

import pytest

from tests.api.scripted_models import LONG, PROMPTS, Able, served_as, vector_of
from tests.api.serving import post
from tests.tables import each

DOCUMENTS = ["w1", "hello world", "hello"]

service = served_as(Able(), prompts=PROMPTS)


@each("path", ["/vectors", "/vectors/"])
async def test_weaviate_s_text_is_embedded_without_a_content_type(client, path):
    body = b'{"text":"hello","config":{"pooling_strategy":"masked_mean"}}'
    answer = await client.post(path, content=body)
    assert (answer.status_code, answer.json()) == (200, {"text": "hello", "vector": vector_of("hello"), "dim": 8})


@each(
    ("config", "text", "dim"),
    [
        (None, "hello", 8),
        ({"pooling_strategy": "cls", "task_type": "query"}, "query : hello", 8),
        ({"task_type": "passage", "dimensions": None}, "passage : hello", 8),
        ({"dimensions": 3}, "hello", 3),
    ],
)
async def test_weaviate_s_config_is_obeyed(client, config, text, dim):
    answer = await post(client, "/vectors", text="hello", config=config)
    assert (answer["vector"], answer["dim"]) == (vector_of(text, dim), dim)


async def test_weaviate_s_texts_are_truncated(client):
    answer = await post(client, "/vectors", text=LONG)
    assert answer["vector"] == vector_of(" ".join(LONG.split()[:62]))
    assert answer["text"] == LONG


@each("named", ["", "title", None])
async def test_weaviate_s_documents_are_scored_in_their_order(client, named):
    answer = await post(client, "/rerank", query="hello world", documents=DOCUMENTS, property=named)
    assert (set(answer), answer["query"]) == ({"query", "scores"}, "hello world")
    assert [scored["document"] for scored in answer["scores"]] == DOCUMENTS
    scores = [scored["score"] for scored in answer["scores"]]
    assert scores[1] > scores[2] > scores[0]


async def test_weaviate_and_vllm_share_a_route_and_each_gets_its_response(client):
    body = {"query": "hello world", "documents": DOCUMENTS}
    ranked, scored = await post(client, "/rerank", **body), await post(client, "/rerank", **body, property="")
    by_index = {result["index"]: result["relevance_score"] for result in ranked["results"]}
    assert [by_index[index] for index in range(3)] == [each["score"] for each in scored["scores"]]


async def test_elasticsearch_gets_an_array_best_first(client):
    body = {"query": "hello world", "documents": DOCUMENTS}
    ranked = await post(client, "/elasticsearch/rerank", **body)
    assert [(item["index"], set(item)) for item in ranked] == [(n, {"index", "score"}) for n in (1, 2, 0)]
    (best,) = await post(client, "/elasticsearch/rerank", **body, top_n=1, return_documents=True)
    assert (best["index"], best["text"], best["score"]) == (1, "hello world", ranked[0]["score"])


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score"])
async def test_elasticsearch_knows_an_input_that_is_too_long_by_a_sentence(client, path):
    body = {"input": LONG} if path == "/v1/embeddings" else {"text_1": LONG, "text_2": "hello"}
    answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith("Please reduce your prompt; or completion length.")
