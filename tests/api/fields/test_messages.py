"""``messages`` in place of ``input``, and contents in place of texts, over real sockets; the runner is scripted."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.api.scripted_models import (
    PROMPTS,
    Able,
    Dots,
    Everything,
    Judge,
    LateInteraction,
    become,
    serve_as,
    vector_of,
)
from tests.api.serving import post, refused, serving
from tests.conftest import assert_idle, client_of, listening, render_templates_on_the_loop, running, until, wait_idle
from tests.model_folders import VOCABULARY
from tests.rendering.media.images import ColourFormat, data_url
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.config import Config, InputConfig
from trio_pool_serve.service import Service
from trio_pool_serve.threads.offload import Offload

HELLO = [{"role": "user", "content": "hello"}]
ENDLESS = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4
CONTENT = "{{ messages[0].content }}"


@pytest.fixture
def config(chat_folder: Path) -> Config:
    return Config(models=(str(chat_folder),), input=InputConfig(trust_request_chat_template=True))


@pytest.fixture
async def service(service):
    serve_as(service, Everything())
    render_templates_on_the_loop(service)
    return service


@pytest.fixture
def processes(service):
    """Templates are rendered in processes, as they are unless a test says otherwise."""
    for workers in service.processes.values():
        workers.in_processes = True
    service.models.find().loaded.renderer.conversations.templates.timeout_s = 1.0
    return service.processes


@pytest.fixture
async def words(scripted_folder: Path, scripted: ScriptedRunner) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a model that reads words, between [CLS] and [SEP], and has no chat template."""
    config = Config(models=(str(scripted_folder),), input=InputConfig(trust_request_chat_template=True))
    async with serving(config, scripted) as (service, client):
        render_templates_on_the_loop(service)
        yield client


async def embedded(client: httpx.AsyncClient, **body: Any) -> list[float]:
    (item,) = (await post(client, **body))["data"]
    return item["embedding"]


# -- conversations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "field", "dimensions"),
    [("/v1/embeddings", "embedding", 8), ("/pooling", "data", 8), ("/classify", "probs", 2)],
)
async def test_a_conversation_is_one_input_read_in_the_model_s_template(client, theirs, path, field, dimensions):
    ids = theirs.apply_chat_template(HELLO, return_dict=False)
    answer = await post(client, path, messages=HELLO)
    (item,) = answer["data"]
    assert item[field] == vector_of(ids, dimensions)
    assert answer["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids), "completion_tokens": 0}


async def test_contents_are_texts_or_lists_of_parts(client, theirs):
    ids = theirs.apply_chat_template([{"role": "user", "content": "one\ntwo"}], return_dict=False)
    for content in (
        "one\ntwo",
        ["one", "two"],
        [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}],
        [{"text": "one"}, "two"],
    ):
        assert await embedded(client, messages=[{"role": "user", "content": content}]) == vector_of(ids)
    nothing = theirs.apply_chat_template([{"role": "user", "content": ""}], return_dict=False)
    for message in ({"role": "user"}, {"role": "user", "content": None}, {"role": "user", "content": []}):
        assert await embedded(client, messages=[message]) == vector_of(nothing)


async def test_a_prompt_is_a_system_message(client, service, theirs):
    become(service, Able())
    names = {"input_type": "query", "task": "retrieval.query", "prompt_name": "query"}
    for name, value in {**names, "prompt": "Be brief."}.items():
        system = {"role": "system", "content": PROMPTS["query"] if name in names else value}
        ids = theirs.apply_chat_template([system, *HELLO], return_dict=False)
        assert await embedded(client, messages=HELLO, **{name: value}) == vector_of(ids), name


async def test_special_tokens_are_the_template_s_unless_asked_for(words):
    hello, cls, sep = (VOCABULARY[word] for word in ("hello", "[CLS]", "[SEP]"))
    asked = {"messages": HELLO, "chat_template": CONTENT}
    assert await embedded(words, **asked) == vector_of([hello])
    assert await embedded(words, **asked, add_special_tokens=True) == vector_of([cls, hello, sep])
    assert await embedded(words, input="hello") == vector_of([cls, hello, sep])


async def test_a_conversation_of_a_megabyte_is_read_as_far_as_it_is_kept(client, processes, service, theirs):
    said = [{"role": role, "content": "hello wörld " * 20_000} for role in ("user", "assistant", "user", "assistant")]
    ids = theirs.apply_chat_template(said, return_dict=False)[:512]
    too_large = await refused(client, messages=said)
    assert "the limit is" in too_large["message"]
    assert too_large["param"] == "messages"
    half = [{**message, "content": message["content"][:120_000]} for message in said]
    assert await embedded(client, messages=half, truncate_prompt_tokens=-1) == vector_of(ids)
    await wait_idle(service)


async def test_without_offloading_templates_are_rendered_on_the_loop(config, scripted, theirs):
    service = Service(config, lambda *_: scripted, offload=Offload(in_threads=False))
    async with running(service), listening(service) as url, client_of(url) as client:
        assert await embedded(client, messages=HELLO) == vector_of(theirs.apply_chat_template(HELLO, return_dict=False))
        assert not service.processes["template"].in_processes


# -- what is refused -------------------------------------------------------------------------------------


async def test_a_hundred_thousand_prompts_are_refused_and_leave_nothing(client, service, scripted):
    for body in ({"input": ["hello"] * 100_000}, {"input": [[7]] * 100_000}, {"messages": HELLO * 100_000}):
        error = await refused(client, **body)
        assert "2048 inputs" in error["message"]
        await wait_idle(service)
    assert scripted.batches == []
    assert len(await embedded(client, input="hello")) == 8


# -- templates that do not end ---------------------------------------------------------------------------


async def busy(service: Service, waiting: int = 0) -> None:
    workers = service.processes["client_template"]
    await until(lambda: workers.statistics().borrowed and workers.statistics().waiting >= waiting, 60)


@pytest.mark.slow
async def test_an_endless_template_ends_in_time_and_the_next_request_is_answered(client, processes, service, theirs):
    expected = vector_of(theirs.apply_chat_template(HELLO, return_dict=False))
    error = await refused(client, messages=HELLO, chat_template=ENDLESS)
    assert error["param"] == "chat_template"
    assert "took longer than 1 s" in error["message"]
    assert_idle(service)
    assert await embedded(client, messages=HELLO) == expected
    assert processes["client_template"].statistics().killed == 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: client.post("/v1/embeddings", json={"messages": HELLO, "chat_template": ENDLESS}))
        await busy(service)
        assert await embedded(client, messages=HELLO) == expected, "others are answered meanwhile"
        nursery.cancel_scope.cancel(reason="the client leaves")
    await wait_idle(service)
    assert processes["client_template"].statistics().killed == 2

    body = {"messages": HELLO, "chat_template": ENDLESS}
    answer = await client.post("/v1/embeddings", json=body, headers={"X-Request-Timeout": "0.2"})
    assert answer.status_code == 504
    await wait_idle(service)
    assert await embedded(client, messages=HELLO) == expected


@pytest.mark.slow
async def test_endless_templates_do_not_hold_up_the_model_s_own(client, processes, service, theirs):
    expected = vector_of(theirs.apply_chat_template(HELLO, return_dict=False))
    assert await embedded(client, messages=HELLO) == expected  # the model's own has its process from now on
    async with trio.open_nursery() as nursery:
        for _ in range(3):  # more than there are processes
            nursery.start_soon(refuse_endless, client)
        await busy(service, waiting=1)
        assert await embedded(client, messages=HELLO) == expected
        assert processes["client_template"].statistics().killed < 3, "it was answered while they were busy"
    assert processes["client_template"].statistics().killed == 3
    await wait_idle(service)


async def refuse_endless(client: httpx.AsyncClient) -> None:
    await refused(client, messages=HELLO, chat_template=ENDLESS)


# -- contents that are compared --------------------------------------------------------------------------

PARTS = {"content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "w"}]}
PICTURE = {"content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}


async def test_a_side_of_a_score_is_a_text_or_a_content(client, service, theirs):
    def ids(text: str) -> list[int]:
        return theirs(text, add_special_tokens=False)["input_ids"]

    def product(first: str, second: str) -> float:
        return sum(a * b for a, b in zip(vector_of(ids(first)), vector_of(ids(second)), strict=True))

    serve_as(service, Dots())
    for first, second in (("data_1", "data_2"), ("queries", "documents"), ("text_1", "text_2"), ("queries", "items")):
        answer = await post(client, "/score", **{first: PARTS, second: ["w", PARTS, {"content": "hello"}]})
        assert [item["score"] for item in answer["data"]] == [
            product("hello\nw", other) for other in ("w", "hello\nw", "hello")
        ]
    answer = await post(client, "/score", data_1=[PARTS, "w"], data_2=["w", PARTS])
    assert [item["score"] for item in answer["data"]] == [product("hello\nw", "w")] * 2
    serve_as(service, LateInteraction())
    answer = await post(client, "/score", data_1=PARTS, data_2=[PARTS, "w"])
    assert [item["score"] for item in answer["data"]] == [7, 1]  # the query's tokens that a document has


async def test_a_judge_reads_contents_of_texts_only(client, service, scripted):
    serve_as(service, Judge())
    scripted.labels = 1
    answer = await post(client, "/score", data_1=PARTS, data_2=["w", {"content": ["w"]}])
    assert [item["score"] for item in answer["data"]] == [8, 8]
    error = await refused(client, "/score", data_1="hello", data_2=[PICTURE])
    assert "accepts no images" in error["message"]
    assert_idle(service)


async def test_documents_to_be_ranked_can_be_contents(client, service):
    serve_as(service, LateInteraction())
    documents = ["zzz", {"text": "hello w"}, PARTS]
    answer = await post(client, "/rerank", query=PARTS, documents=documents)
    assert [(result["index"], result["document"]["text"]) for result in answer["results"]] == [
        (2, "hello\nw"),
        (1, "hello w"),
        (0, "zzz"),
    ]


async def test_an_image_of_a_conversation_that_is_none_is_named_by_its_place(client, service):
    service.models.find().loaded.renderer.conversations.image_format = ColourFormat()
    content = ["hello", {"type": "image_url", "image_url": data_url(b"hello")}]
    messages = [{"role": "user", "content": "hello"}, {"role": "user", "content": content}]
    # A template that takes contents of parts: of two failures, the first to happen would be told.
    answer = await client.post("/v1/embeddings", json={"messages": messages, "chat_template": CONTENT})
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    assert error["param"] == "messages"
    assert error["message"].startswith("messages[1].content[1]: The ")
    await wait_idle(service)
