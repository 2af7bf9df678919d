"""``prompt_embeds`` over HTTP: in place of ``input``, several at once, refused one by one."""

import base64
import json
from collections.abc import AsyncIterator
from functools import partial

import attrs
import httpx
import numpy as np
import pytest
import safetensors.torch
import torch
import trio

from tests.api.serving import post, refused, serving
from tests.conftest import UNHURRIED, client_of, listening, make_slow, running, wait_idle
from tests.scripted_runner import ScriptedRunner
from tests.tables import each
from tests.tensors import HOSTILE, ROWS, WIDTH, as_npy
from tests.torch_files import as_torch
from trio_pool_serve.api.dialects import DIALECTS
from trio_pool_serve.api.http.endpoint_choice import decode_body, endpoints_by_path
from trio_pool_serve.api.http.json_body import LONG, Payloads, cut_payloads, payload_decoder
from trio_pool_serve.config import Config, InputConfig, NetworkConfig, SchedulingConfig
from trio_pool_serve.rendering.prompt_embeds import EmbedsFormat
from trio_pool_serve.service import Service
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import CopiedBatch

GOOD = base64.b64encode(as_npy(ROWS)).decode()


@pytest.fixture
def config(config: Config) -> Config:
    return attrs.evolve(config, input=InputConfig(enable_prompt_embeds=True), scheduling=UNHURRIED)


@pytest.fixture
def scripted() -> ScriptedRunner:
    return ScriptedRunner(embeds_width=WIDTH)


def sent(scripted: ScriptedRunner) -> list[np.ndarray]:
    return [request.prompt.embeds for batch in scripted.batches for request in batch.requests]


@pytest.mark.parametrize("route", ["/v1/embeddings", "/pooling"])
async def test_embeddings_reach_the_model_and_their_rows_are_counted(client, scripted, route):
    answer = await post(client, route, prompt_embeds=GOOD)
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5, "completion_tokens": 0}
    (embeds,) = sent(scripted)
    assert np.array_equal(embeds, ROWS.numpy())


@pytest.mark.parametrize("beside", [{"input": ""}, {"input": None}, {"input": []}, {}])
async def test_a_file_of_torch_is_sent_as_vllm_s_clients_send_it(client, scripted, beside):
    """OpenAI's client insists on an input; vLLM's examples send an empty one."""
    await post(client, **beside, prompt_embeds=base64.b64encode(as_torch(ROWS)).decode())
    assert np.array_equal(sent(scripted)[0], ROWS.numpy())


async def test_json_escapes_are_undone(client, scripted):
    escaped = GOOD.replace("/", "\\/").replace("+", "\\u002b")
    assert escaped != GOOD
    answer = await client.post(
        "/v1/embeddings", content=f'{{"prompt_embeds": "{escaped}"}}', headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 200, answer.text
    assert np.array_equal(sent(scripted)[0], ROWS.numpy())


@pytest.mark.parametrize(
    "mark", [{"truncate": True}, {"truncation": True}, {"truncate_prompt_tokens": -1, "task": "text-matching"}]
)
async def test_rows_are_cut_where_jina_and_voyage_say_so(client, scripted, mark):
    long = torch.cat([ROWS] * 13)
    encoded = base64.b64encode(as_npy(long)).decode()
    await post(client, prompt_embeds=encoded, **mark)
    (embeds,) = sent(scripted)
    assert np.array_equal(embeds, long[:64].numpy())
    error = await refused(client, prompt_embeds=encoded, task="text-matching")
    assert "at most 64 rows" in error["message"]


async def test_a_large_one_is_read_with_the_fields_of_its_dialect(client):
    """A body in which names are searched for, and of which the payload has been cut."""
    padded = json.dumps({"prompt_embeds": GOOD, "user": "x" * 300_000, "output_dtype": "binary"})
    answer = await client.post("/v1/embeddings", content=padded, headers={"Content-Type": "application/json"})
    assert len(answer.json()["data"][0]["embedding"]) == 1, answer.text


async def test_a_long_name_of_what_was_cut_is_no_base64(client):
    assert "base64" in (await refused(client, prompt_embeds="#" + "9" * 5000))["message"]


@each("name", HOSTILE)
async def test_hostile_tensors_are_400_and_the_next_request_is_answered(client, service, scripted, name):
    stored, _, said = HOSTILE[name]
    scripted.batches.clear()
    error = await refused(client, prompt_embeds=base64.b64encode(stored).decode())
    assert said in error["message"]
    assert error["param"] == "prompt_embeds"
    assert scripted.batches == []
    await post(client, input="hello")
    await wait_idle(service)


async def test_embeddings_of_which_the_model_makes_no_finite_numbers_are_refused(client, service, scripted):
    scripted.on_launch = lambda _: CopiedBatch([(np.full(8, np.inf, dtype=np.float32),)])
    error = await refused(client, prompt_embeds=GOOD)
    assert error["param"] == "prompt_embeds"
    assert "not finite" in error["message"]
    await wait_idle(service)


async def test_a_model_that_takes_none_says_so(config):
    async with serving(config, ScriptedRunner()) as (_service, client):
        assert "not accept token embeddings" in (await refused(client, prompt_embeds=GOOD))["message"]


# -- one bad among good ones ------------------------------------------------------------------------------


@attrs.frozen
class NotingFormat(EmbedsFormat):
    """Notes how many rows each prompt had that was begun."""

    begun: list[int] = attrs.field(factory=list)

    def render(self, prompt, params):
        self.begun.append(len(prompt.payload))
        return super().render(prompt, params)


@pytest.fixture
async def one_at_a_time(config, scripted) -> AsyncIterator[tuple[Service, NotingFormat, httpx.AsyncClient]]:
    """A service that decodes one prompt after the other, and notes which."""
    async with running(Service(config, lambda *_: scripted, offload=Offload(render=1))) as service:
        noting = NotingFormat(WIDTH, 64)
        service.model().renderer.embeds_format = noting
        async with listening(service) as url, client_of(url) as client:
            yield service, noting, client


async def test_the_first_bad_one_cancels_its_siblings(one_at_a_time):
    service, noting, client = one_at_a_time
    prompts = [base64.b64encode(as_npy(ROWS[: n + 1])).decode() for n in range(5)]
    prompts[2] = "AAAA"
    # More prompts than may wait for a thread at once: those behind the bad one have not entered the queue by then.
    error = await refused(client, prompt_embeds=prompts + prompts[3:] * 20)
    assert error["message"].startswith("prompt_embeds[2]: The tensor ")
    assert "unknown format" in error["message"]
    await wait_idle(service)
    assert noting.begun[:3] == [len(prompt) for prompt in prompts[:3]]
    assert len(noting.begun) < 10
    await post(client, prompt_embeds=GOOD)


async def test_rows_count_towards_the_queue_however_narrow_they_are(config, scripted):
    rows = base64.b64encode(as_npy(ROWS.repeat(8, 1))).decode()
    scripted.gate.clear()
    config = attrs.evolve(config, scheduling=SchedulingConfig())
    async with serving(config, scripted) as (service, client), trio.open_nursery() as nursery:
        make_slow(service)
        nursery.start_soon(partial(client.post, "/v1/embeddings", json={"prompt_embeds": rows}))
        await trio.to_thread.run_sync(scripted.launching.wait, limiter=trio.CapacityLimiter(1))
        assert 40 <= service.models.find().engine.statistics().admitted_tokens <= 64
        answer = await client.post("/v1/embeddings", json={"prompt_embeds": [rows, rows]})
        assert answer.status_code == 429
        scripted.gate.set()
        await wait_idle(service)


# -- long ones are cut out of the body ------------------------------------------------------------------------


MOST = 8


def read(body: bytes) -> tuple[dict, list[bytes]]:
    """Return the rest of a body, and the payloads."""
    rest, cuts = cut_payloads(bytearray(body), MOST)
    document = json.loads(bytes(rest))
    payloads = payload_decoder(cuts)
    return document, [bytes(item) for item in payloads(Payloads, document["prompt_embeds"]).items]


LONG_ONE, LONG_TWO = "A" * (LONG + 4), "B" * (LONG + 8)


@pytest.mark.parametrize(
    ("text", "expected", "cut"),
    [
        (f'{{"prompt_embeds":"{LONG_ONE}"}}', [LONG_ONE], 1),
        (f'{{"model":"m","prompt_embeds" :\n [ "{LONG_ONE}" , "C","{LONG_TWO}"],"x":1}}', [LONG_ONE, "C", LONG_TWO], 2),
        (f'{{"prompt_embeds":"C","{LONG_ONE}":1}}', ["C"], 0),
        (f'{{"prompt_embeds":"{LONG_ONE}\\/"}}', [f"{LONG_ONE}/"], 0),
        (f'{{"say \\"prompt_embeds":"{LONG_ONE}","prompt_embeds":"C"}}', ["C"], 0),
        (f'{{"user":"prompt_embeds","prompt_embeds":"{LONG_ONE}"}}', [LONG_ONE], 0),
        (f'{{"prompt_embeds":"C","prompt_embeds":"{LONG_ONE}"}}', [LONG_ONE], 0),
    ],
)
def test_long_payloads_are_cut_and_put_back(text, expected, cut):
    document, payloads = read(text.encode())
    assert payloads == [payload.encode() for payload in expected]
    assert len(cut_payloads(bytearray(text.encode()), MOST)[1]) == cut
    assert set(document) == set(json.loads(text))


def test_no_more_are_cut_than_a_request_may_have():
    several = [LONG_ONE, "C", LONG_TWO, LONG_ONE]
    rest, cuts = cut_payloads(bytearray(json.dumps({"prompt_embeds": several}).encode()), 3)
    assert [bytes(cut).decode() for cut in cuts.values()] == [LONG_ONE, LONG_TWO]
    document = json.loads(bytes(rest))
    assert document["prompt_embeds"][1::2] == ["C", LONG_ONE]
    assert [
        bytes(item).decode() for item in payload_decoder(cuts)(Payloads, document["prompt_embeds"]).items
    ] == several


def test_the_same_body_is_given_other_names_each_time():
    body = json.dumps({"prompt_embeds": [LONG_ONE, LONG_TWO]}).encode()
    names = [name for _ in range(3) for name in cut_payloads(bytearray(body), MOST)[1]]
    assert len(set(names)) == 6


class Counted(bytearray):
    """Counts how often something is looked for in it, and past how many bytes."""

    searches = searched = 0

    def find(self, what, start, end):
        found = super().find(what, start, end)
        self.searches += 1
        self.searched += (end if found < 0 else found) - start
        return found


def work_of(payloads: str, most: int) -> Counted:
    body = Counted(f'{{"prompt_embeds":[{payloads}]}}'.encode())
    cut_payloads(body, most)
    return body


@pytest.mark.parametrize("piece", ['""', f'"{LONG_ONE}"', f'"{LONG_ONE}\\\\"'], ids=["empty", "long", "escaped"])
def test_twice_the_body_is_at_most_twice_the_work(piece):
    count = 4 + 2 * LONG // len(piece)
    once, twice = (work_of(",".join([piece] * many), 10**6) for many in (count, 2 * count))
    assert once.searches >= count
    assert twice.searches <= 2 * once.searches
    assert twice.searched <= 2.1 * once.searched
    assert once.searched <= 2.1 * len(once)


def test_strings_past_the_most_are_not_looked_at():
    once, many = (work_of(",".join(['""'] * count), 100) for count in (50_000, 200_000))
    assert once.searches == many.searches == 101
    assert once.searched == many.searched


async def test_more_empty_strings_than_inputs_are_counted_exactly(client):
    message = (await refused(client, prompt_embeds=[""] * 50_000))["message"]
    assert "prompt_embeds has 50000 inputs; the limit is 2048 (--max-inputs-per-request)." in message


def test_nothing_is_cut_where_no_embeds_are_taken():
    body = Counted(json.dumps({"prompt_embeds": [LONG_ONE, "C"]}).encode())
    asked = decode_body(body, endpoints_by_path(DIALECTS)["/v1/embeddings"], NetworkConfig())
    assert body.searches == 0
    assert [type(item) for item in asked.wire.prompt_embeds.items] == [bytes, bytes]


async def test_a_client_cannot_name_what_was_cut(client):
    long = base64.b64encode(safetensors.torch.save({"embeds": ROWS}, metadata={"of": "a" * 60_000})).decode()
    assert len(long) > LONG
    await post(client, prompt_embeds=[long])
    for names in (["#0"] * 3, ["#0"], ["#"], ["#00", "#1"]):
        assert "not valid base64" in (await refused(client, prompt_embeds=[*names, long]))["message"]


@pytest.mark.parametrize("text", [f'{{"prompt_embeds":"{LONG_ONE}', f'{{"prompt_embeds":"{LONG_ONE}" "', LONG_ONE])
async def test_a_body_that_is_no_json_is_400(client, text):
    answer = await client.post("/v1/embeddings", content=text, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert "not valid JSON" in answer.json()["error"]["message"]
