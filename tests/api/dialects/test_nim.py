"""NIM's routes over real sockets; the runner is scripted, so every answer is known."""

import attrs
import pytest

from tests.api.scripted_models import PROMPTS, Able, Judge, become, serve_as, served_as, vector_of
from tests.api.serving import post, serving, vectors
from tests.tables import each
from trio_pool_serve.config import Config
from trio_pool_serve.types import Classify

service = served_as(Able(), prompts=PROMPTS)


@pytest.fixture
def config(config: Config) -> Config:
    return Config(models=(f"nv/embed={config.models[0]}",))


async def test_a_model_that_takes_any_name_takes_names_with_suffixes(config, scripted):
    config = attrs.evolve(config, models=(config.models[0].partition("=")[2],))
    config = attrs.evolve(config, loading=attrs.evolve(config.loading, served_model_name="first,*"))
    async with serving(config, scripted) as (service, client):
        serve_as(service, Able(), prompts=PROMPTS)
        assert await vectors(client, input="hello", model="nv-embedqa-query") == [vector_of("query : hello")]


@each("path", ["/v1/ranking", "/ranking", "/reranking", "/v1/reranking", "/v1/retrieval/nv/embed/reranking"])
async def test_passages_are_ranked_by_logits(client, service, scripted, path):
    become(service, Judge())
    scripted.labels = 1
    await post(client, path, query={"text": "hello"}, passages=[{"text": "w1"}, {"text": "w1 w2 w3"}])
    params = {request.params for batch in scripted.batches for request in batch.requests}
    assert params == {(Classify("raw"),)}
