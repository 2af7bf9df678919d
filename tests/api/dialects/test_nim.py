"""NIM's routes over real sockets; the runner is scripted, so every answer is known."""

import attrs
import pytest

from tests.api.scripted_models import LONG, PROMPTS, Able, Judge, become, serve_as, served_as, vector_of
from tests.api.serving import post, refused, serving, vectors
from tests.tables import each
from trio_pool_serve.config import Config
from trio_pool_serve.types import Classify

PASSAGES = [{"text": "w1"}, {"text": "w1 w2 w3"}, {"text": "w1 w2"}]

service = served_as(Able(), prompts=PROMPTS)


@pytest.fixture
def config(config: Config) -> Config:
    return Config(models=(f"nv/embed={config.models[0]}",))


@each(
    ("truncate", "kept"),
    [("END", slice(None, 62)), ("START", slice(-62, None)), ("NONE", None), (True, slice(None, 62)), (False, None)],
)
async def test_truncate_may_be_nim_s_string_or_jina_s_boolean(client, truncate, kept):
    words = LONG.split()
    body = {"input": LONG, "truncate": truncate, "model": "nv/embed"}
    if kept is None:
        assert "maximum context length is 64 tokens" in (await refused(client, **body))["message"]
    else:
        assert await vectors(client, **body) == [vector_of(" ".join(words[kept]))]


@each("fields", [{}, {"encoding_format": "float", "truncate": "NONE"}, {"input_type": "passage", "truncate": "END"}])
async def test_a_suffix_of_the_name_is_the_input_type_whatever_the_field_says(client, fields):
    for suffix, prompt in (("-query", "query : "), ("-passage", "passage : ")):
        answer = await post(client, input="hello", model=f"nv/embed{suffix}", **fields)
        assert answer["data"][0]["embedding"] == vector_of(f"{prompt}hello")
        assert answer["model"] == "nv/embed"


async def test_an_endpoint_without_input_types_knows_no_suffixes(client):
    body = {"inputs": [{"content": "hello"}], "model": "nv/embed-query"}
    assert "`nv/embed-query`" in (await refused(client, "/v1/multimodalembeddings", body, 404))["message"]
    body = {"query": "hello", "documents": ["w1"], "top_k": 1, "model": "nv/embed-query"}
    assert "`nv/embed-query`" in (await refused(client, "/v1/rerank", body, 404))["message"]


async def test_a_model_that_takes_any_name_takes_names_with_suffixes(config, scripted):
    config = attrs.evolve(config, models=(config.models[0].partition("=")[2],))
    config = attrs.evolve(config, loading=attrs.evolve(config.loading, served_model_name="first,*"))
    async with serving(config, scripted) as (service, client):
        serve_as(service, Able(), prompts=PROMPTS)
        assert await vectors(client, input="hello", model="nv-embedqa-query") == [vector_of("query : hello")]


async def test_only_a_suffix_of_a_known_name_counts(client):
    for name in ("other-query", "nv/embed-queries", "-query", "nv/embed-query-query"):
        assert f"`{name}`" in (await refused(client, status=404, input="hello", model=name))["message"]


@each("path", ["/v1/ranking", "/ranking", "/reranking", "/v1/reranking", "/v1/retrieval/nv/embed/reranking"])
async def test_passages_are_ranked_by_logits(client, service, scripted, path):
    become(service, Judge())
    scripted.labels = 1
    answer = await post(client, path, query={"text": "hello"}, passages=PASSAGES, truncate="NONE")
    assert [rank["index"] for rank in answer["rankings"]] == [1, 2, 0]
    assert set(answer["rankings"][0]) == {"index", "logit"}
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 0
    params = {request.params for batch in scripted.batches for request in batch.requests}
    assert params == {(Classify("raw"),)}


async def test_the_path_names_the_model_if_the_body_does_not(client, service, scripted):
    become(service, Judge())
    scripted.labels = 1
    body = {"query": {"text": "hello"}, "passages": PASSAGES}
    path = "/v1/retrieval/nv/other/reranking"
    assert "`nv/other`" in (await refused(client, path, body, 404))["message"]
    both = await refused(client, path, {**body, "model": "nv/embed"})
    assert both["message"].startswith("The path names the model `nv/other`, but the body names `nv/embed`")
    path = "/v1/retrieval/nv/embed/reranking/"
    assert (await post(client, path, **body, model="nv/embed", top_k=2))["rankings"][1]["index"] == 2
