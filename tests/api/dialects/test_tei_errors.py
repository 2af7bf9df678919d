"""Every row of the error table as TEI's clients read it; nothing crashes, and the next request is answered."""

import attrs
import trio

from tests.api.dialects.tei_models import Served, assert_error_body, serving
from tests.tables import each
from trio_pool_serve.api.dialects.tei import TEI

JSON = {"Content-Type": "application/json"}

PATHS = sorted(path for endpoint in TEI.endpoints for path in endpoint.paths)

MINE = [path for path in PATHS if path not in {"/rerank", "/tokenize"}]
"""Those that no other dialect shares: here even what cannot be read at all is answered as TEI would."""


WRONG_INPUTS = {
    "none": b"{}",
    "null": b'{"inputs": null}',
    "a number": b'{"inputs": 5}',
    "an object": b'{"inputs": {}}',
    "floats": b'{"inputs": [1.5]}',
    "booleans": b'{"inputs": [true]}',
    "texts and ids": b'{"inputs": ["hello", 5]}',
    "ids and lists": b'{"inputs": [5, [5]]}',
    "lists of lists": b'{"inputs": [[[5]]]}',
    "lists of texts": b'{"inputs": [["hello"]]}',
    "a lone surrogate": b'{"inputs": "\\ud800"}',
    "a negative id": b'{"inputs": [5, -1]}',
    "an id out of the vocabulary": b'{"inputs": [[5], [100000]]}',
    "an id past 64 bits": b'{"inputs": [123456789012345678901234567890]}',
    "too many": b'{"inputs": [' + b"[5]," * 2048 + b"[5]]}",
    "dimensions 0": b'{"inputs": "hello", "dimensions": 0}',
    "dimensions too large": b'{"inputs": "hello", "dimensions": 9}',
    "dimensions a text": b'{"inputs": "hello", "dimensions": "three"}',
    "normalize a text": b'{"inputs": "hello", "normalize": "maybe"}',
    "truncate a number": b'{"inputs": "hello", "truncate": 2}',
    "truncation of neither side": b'{"inputs": "hello", "truncation_direction": "top"}',
    "truncation of a number": b'{"inputs": "hello", "truncation_direction": 1}',
    "an unknown prompt": b'{"inputs": "hello", "prompt_name": "poem"}',
}


@each("body", WRONG_INPUTS.values(), ids=WRONG_INPUTS)
@each("path", ["/embed", "/embed_all"])
async def test_wrong_input_is_422(embedding: Served, path, body):
    answer = await embedding.http.post(path, content=body, headers=JSON)
    assert answer.status_code == 422, answer.text
    assert_error_body(answer)
    assert answer.json()["error_type"] == "Validation"
    assert answer.headers["x-request-id"]


@each("inputs", [[], [[]], [[5], []], "", [""], ["hello", ""]])
@each("path", ["/embed", "/embed_all", "/"])
async def test_nothing_to_embed_is_empty(embedding: Served, path, inputs):
    assert await embedding.refused(path, inputs=inputs) == (400, "Empty")


async def test_an_over_long_input_is_422_with_both_lengths(embedding: Served):
    for path in ("/embed", "/embed_all", "/"):
        answer = await embedding.http.post(path, json={"inputs": "hello " * 63, "truncate": False})
        assert answer.status_code == 422
        assert "65" in answer.json()["error"]
        assert "64" in answer.json()["error"]


async def test_a_body_past_the_limit_is_413(embedding: Served):
    answer = await embedding.http.post("/embed", content=b'"' + b"x" * 20_000_000, headers=JSON)
    assert answer.status_code == 413
    assert_error_body(answer)
    assert answer.json()["error_type"] == "Validation"


async def test_another_method_is_405(embedding: Served):
    for method, path in (("GET", "/embed"), ("PUT", "/")):  # GET / is a probe
        answer = await embedding.http.request(method, path)
        assert answer.status_code == 405
        assert_error_body(answer)
        assert "POST" in answer.headers["allow"]


async def test_a_deadline_that_is_no_number_of_seconds_is_422(embedding: Served):
    answer = await embedding.http.post("/embed", json={"inputs": "hello"}, headers={"X-Request-Timeout": "soon"})
    assert (answer.status_code, answer.json()["error_type"]) == (422, "Validation")


async def test_a_failed_batch_does_not_harm_its_neighbours(embedding: Served):
    def fail_on_nines(batch):
        if any(9 in request.prompt.token_ids for request in batch.requests):
            raise ValueError("nines")

    embedding.runner.on_launch = fail_on_nines
    statuses = {}

    async def one(token: int) -> None:
        statuses[token] = (await embedding.http.post("/embed", json={"inputs": [token] * 40})).status_code

    async with trio.open_nursery() as nursery:
        for token in (7, 8, 9, 10):
            nursery.start_soon(one, token)
    assert statuses == {7: 200, 8: 200, 9: 424, 10: 200}
    embedding.runner.on_launch = None


async def test_without_the_key_nothing_is_answered(config):
    locked = attrs.evolve(config, network=attrs.evolve(config.network, api_key="s3cret"))
    async with serving(locked) as served:
        for path in MINE:
            answer = await served.http.post(path, json={"inputs": "hello"})
            assert answer.status_code == 401, path
            assert_error_body(answer)
            assert answer.json()["error_type"] == "Unauthorized"
        assert (await served.http.get("/info")).status_code == 401
        for key in ("s3cret", "Bearer s3cret"):  # llama-index sends the bare one
            headers = {"Authorization": key}
            assert (await served.http.post("/embed", json={"inputs": "hello"}, headers=headers)).status_code == 200
            assert (await served.http.get("/info", headers=headers)).status_code == 200


async def test_megabytes_are_not_sent_back(embedding: Served):
    for field in ("model", "prompt_name", "truncation_direction"):
        answer = await embedding.http.post("/embed", json={"inputs": "hello", field: "x" * 2_000_000})
        assert answer.status_code in (404, 422)
        assert len(answer.content) < 2000
