"""``/invocations``: each body is answered as by the route that its fields tell."""

from tests.api.scripted_models import Everything, Labeller, serve_as, served_as
from tests.tables import each

service = served_as(Everything())


SAME = [
    ("/v1/embeddings", {"input": ["hello", "w1"]}),
    ("/v1/embeddings", {"input": [[5, 6]], "encoding_format": "base64"}),
    ("/v1/embeddings", {"input": "hello", "task": "retrieval.query"}),
    ("/v1/embeddings", {"input": "hello", "task": "embed"}),
    ("/v1/embeddings", {"input": "hello", "input_type": "query", "output_dtype": "int8"}),
    ("/classify", {"input": "hello", "task": "classify"}),
    ("/pooling", {"input": "hello", "task": "token_embed"}),
    ("/pooling", {"input": "hello", "tasks": ["embed", "classify"]}),
    ("/rerank", {"query": "hello", "documents": ["w1", "w2"], "top_n": 1}),
    ("/rerank", {"query": "hello", "documents": ["w1", "w2"], "top_k": 1}),
    ("/rerank", {"query": "hello", "texts": ["w1", "w2"], "raw_scores": True}),
    ("/score", {"text_1": "hello", "text_2": ["w1", "w2"]}),
    ("/score", {"data_1": "hello", "data_2": "w1"}),
    ("/score", {"queries": ["hello"], "documents": ["w1"]}),
    ("/score", {"queries": ["hello"], "items": ["w1"]}),
    ("/v2/embed", {"texts": ["hello"], "input_type": "search_query"}),
    ("/v2/embed", {"inputs": [{"content": "hello"}], "embedding_types": ["int8"]}),
    ("/rerank", {"input": None, "query": "hello", "documents": ["w1"], "top_n": 0}),
    ("/", {"inputs": ["hello", "w1"]}),
    ("/", {"inputs": "hello", "parameters": {"normalize": False}}),
    ("/", {"inputs": {"source_sentence": "hello", "sentences": ["w1"]}}),
]
WRONG = [
    ("/v1/embeddings", {"input": "hello", "model": "another"}, 404),
    ("/rerank", {"query": "hello", "texts": []}, 400),
    ("/score", {"text_1": "hello"}, 400),
    ("/v2/embed", {"texts": []}, 400),
    ("/", {"inputs": 5}, 422),
]


def without_names(answer):
    """What an answer says of the request, without what is new in each."""
    document = answer.json()
    if isinstance(document, dict):
        document = {name: value for name, value in document.items() if name not in ("id", "created")}
    return document


@each(("path", "body", "status"), [*((path, body, 200) for path, body in SAME), *WRONG])
async def test_a_body_is_answered_as_by_its_own_route(client, path, body, status):
    answer, own = [await client.post(sent_to, json=body) for sent_to in ("/invocations", path)]
    assert answer.status_code == own.status_code == status, answer.text
    assert without_names(answer) == without_names(own)


@each("body", [{}, {"text_2": "w1"}, {"query": "hello"}, {"documents": ["w1"]}, {"prompt": "hello"}])
async def test_a_body_for_no_route_is_told_what_there_is(client, body):
    answer = await client.post("/invocations", json=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith("Cannot find a suitable handler")
    for names in ("input", "documents + query", "queries", "inputs"):
        assert names in message


@each(
    "content",
    [b"", b"[]", b'{"input": "a"', b'{"inputs": "a", "model": "\xff\xfe"}', b'{"input": "a", "task": 1e99999}'],
)
async def test_what_is_no_object_is_refused_in_openai_s_shape(client, content):
    answer = await client.post("/invocations", content=content)
    assert answer.status_code == 400
    assert set(answer.json()) == {"error", "detail"}
    assert (await client.post("/invocations", json={"input": "hello"})).status_code == 200


async def test_a_text_to_classify_is_answered_as_by_predict_unless_it_comes_from_the_hub_s_client(client, service):
    serve_as(service, Labeller())
    bodies = [
        ({"inputs": "hello"}, "/predict"),
        ({"inputs": "hello", "parameters": None}, "/predict"),
        ({"inputs": "hello", "parameters": {}}, "/"),
    ]
    for body, path in bodies:
        answer = await client.post("/invocations", json=body)
        assert answer.status_code == 200
        assert answer.json() == (await client.post(path, json=body)).json()
    assert isinstance((await client.post("/invocations", json={"inputs": "hello"})).json()[0], dict)
    assert "probs" in (await client.post("/invocations", json={"input": "hello"})).json()["data"][0]
