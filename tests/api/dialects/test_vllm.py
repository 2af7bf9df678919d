"""What vLLM's routes have in common, and its tokens; over real sockets, with a scripted runner."""

import httpx

from tests.api.scripted_models import Everything, served_as
from tests.api.serving import post, refused
from tests.conftest import wait_idle
from tests.model_folders import VOCABULARY
from tests.tables import each
from trio_pool_serve.service import Service

LONG = "hello " * 20
"""About 30 tokens by the guess that admission makes, and 22 in truth."""

BODIES = {
    "/pooling": {"input": LONG},
    "/classify": {"input": LONG},
    "/v1/classify": {"input": LONG},
    "/score": {"text_1": LONG, "text_2": "world"},
    "/v1/score": {"text_1": LONG, "text_2": "world"},
    "/rerank": {"query": LONG, "documents": ["world"]},
    "/v1/rerank": {"query": LONG, "documents": ["world"]},
    "/tokenize": {"prompt": LONG},
    "/detokenize": {"tokens": [5, 6]},
}
COMPUTED = [path for path in BODIES if "tokenize" not in path]

service = served_as(Everything())


async def assert_still_serving(client: httpx.AsyncClient, service: Service, path: str) -> None:
    await post(client, path, **BODIES[path])
    await wait_idle(service)


@each("path", COMPUTED)
async def test_an_over_long_input_is_refused_unless_it_may_be_cut(client, service, path):
    body = {name: "hello " * 100 if value == LONG else value for name, value in BODIES[path].items()}
    error = await refused(client, path, body)
    length = 102 if "input" in body else 104  # the model has a prompt of its own for queries
    assert f"{length} tokens" in error["message"]
    assert error["param"] in ("input", "text_1", "query")
    assert error["message"].startswith(f"{error['param']} has ")
    assert "maximum context length is 64 tokens" in error["message"]
    await post(client, path, **body, truncate_prompt_tokens=-1)
    await assert_still_serving(client, service, path)


# -- tokens ----------------------------------------------------------------------------------------------

HELLO, WORLD, CLS, SEP = (VOCABULARY[word] for word in ("hello", "world", "[CLS]", "[SEP]"))


async def test_more_tokens_than_the_model_takes_are_counted_all_the_same(client):
    answer = await post(client, "/tokenize", prompt="hello " * 5000)
    assert answer["count"] == len(answer["tokens"]) == 5002


async def test_tokens_become_text_again_with_their_special_ones(client):
    answer = await post(client, "/detokenize", tokens=[CLS, HELLO, WORLD, SEP], model=None)
    assert answer == {"prompt": "[CLS] hello world [SEP]"}
    assert await post(client, "/detokenize", tokens=[]) == {"prompt": ""}
