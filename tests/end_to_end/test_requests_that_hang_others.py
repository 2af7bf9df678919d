"""Requests that hang other servers, sent to real ones: each is answered, and so is the next within a second."""

import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
import trio
from attrs import define, field

from tests.api.serving import key_file_of
from tests.conftest import client_of
from tests.end_to_end.hanging_requests import (
    MAX_INPUTS,
    PAGE,
    PROBES,
    REQUESTS,
    SHORT_BATCH,
    TEMPLATE,
    HangingRequest,
    what_hangs_others_page,
)
from tests.models.model_families import edit_json, edit_weights, write_family
from tests.models.vision_families import clip
from tests.pipes import write
from tests.server.server_process import (
    API_PROCESS,
    ENGINE_PROCESS,
    LAUNCHER,
    SCRIPTED,
    ServerProcess,
    busy_of,
    make_pipes,
    serving,
    until,
)

KEYS = """\
all = {key = "all", admin = true}
one = {key = "one", max_concurrent_requests = 1}
five = {key = "five", max_concurrent_requests = 5}
"""

ENGINES = [
    pytest.param(("--engine", "local"), id="local"),
    pytest.param(("--engine", "process", "--api-workers", "2"), id="api-workers", marks=pytest.mark.slow),
]

LONG = ("vllm#52163",)
"""Take several seconds, in which others are answered."""

CASES = [pytest.param(each, id=each.name, marks=[pytest.mark.slow] if each.name in LONG else []) for each in REQUESTS]

WITHIN_S, TRIES = 1, 5


def vectors_of(answer: httpx.Response) -> np.ndarray:
    """Return the vectors of a response of either dialect, shape (inputs, dimensions); NaN for null."""
    body = answer.json()
    rows = body if isinstance(body, list) else [item["embedding"] for item in body["data"]]
    return np.array(rows, dtype=np.float32)


@define(eq=False)
class Driven:
    """A server with models, and the vector that each of them has for a short text."""

    server: ServerProcess
    ordinary: dict[str, np.ndarray] = field(factory=dict)
    processes: set[int] = field(factory=set)

    @asynccontextmanager
    async def client(self, key: str = "all") -> AsyncIterator[httpx.AsyncClient]:
        async with client_of(self.server.url) as client:
            client.headers["Authorization"] = f"Bearer {key}"
            yield client

    async def embed(self, client: httpx.AsyncClient, model: str) -> np.ndarray:
        body = {"input": [5]} if model == "scripted" else {"model": model, "input": "yes"}
        answer = await client.post("/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text
        (vector,) = vectors_of(answer)
        return vector

    async def learn(self, *models: str, api_workers: int) -> None:
        await self.server.wait_joined(api_workers, headers={"Authorization": "Bearer all"})
        async with self.client() as client:
            self.ordinary = {model: await self.embed(client, model) for model in models}
        self.processes = self.running()

    def running(self) -> set[int]:
        """The ids of engine and API processes, without the first; processes that render templates may end."""
        return {each.pid for module in (ENGINE_PROCESS, API_PROCESS) for each in self.server.processes(module)}

    async def check_next(self, case: HangingRequest, within_s: float = WITHIN_S) -> None:
        """The next request of the same client, for the same model, is answered in time.

        Other tests may keep the cores busy, so one of the next ``TRIES`` has to be.
        """
        took_s = []
        async with self.client(case.key) as client:
            while not took_s or (min(took_s) >= within_s and len(took_s) < TRIES):
                begun = trio.current_time()
                vector = await self.embed(client, case.model)
                took_s.append(trio.current_time() - begun)
                np.testing.assert_allclose(vector, self.ordinary[case.model], atol=1e-5)
        assert min(took_s) < within_s, took_s

    async def check_well(self) -> None:
        """The same processes are alive, and nothing is queued, computed or held."""
        async with self.client() as client:
            assert (await client.get("/livez")).status_code == 200
            assert (await client.get("/health")).status_code == 200

            async def is_idle() -> bool:
                load = (await client.get("/load")).json()
                return not busy_of(load) and not load["request_memory_bytes"]

            await until(is_idle, limit_s=20)
        assert self.running() == self.processes

    async def send(self, case: HangingRequest) -> list[httpx.Response]:
        """Send the requests of a case at once, and with them an ordinary one, unless the client may send no more.

        A scripted runner follows the first row of a batch only, so it gets no other.
        """
        answers: list[httpx.Response] = []
        async with self.client(case.key) as client, trio.open_nursery() as nursery:

            async def send() -> None:
                body = case.body if case.model == "scripted" else {"model": case.model, **case.body}
                answers.append(await client.post(case.path, json=body, headers=case.headers))

            for _ in range(case.times):
                nursery.start_soon(send)
            if case.key == "all" and case.model != "scripted":
                await self.check_next(case, math.inf)
                assert not (answers and case.name in LONG)
        return answers


@pytest.fixture(scope="module")
def folders(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A published model, and tiny ones: a Qwen3, a CLIP, and a BERT that overflows at a word."""
    root = tmp_path_factory.mktemp("models")
    qwen3 = write_family(root / "qwen3", "qwen3", max_seq_length=8192)
    edit_json(qwen3 / "config.json", lambda config: config.update(max_position_embeddings=8192))
    edit_json(qwen3 / "tokenizer_config.json", lambda config: config.update(chat_template=TEMPLATE))
    overflowing = write_family(root / "overflowing", "bert")
    (_, first, *_) = transformers.AutoTokenizer.from_pretrained(overflowing)("nursery")["input_ids"]

    def overflow(weights: dict[str, Any]) -> None:
        (table,) = (weight for name, weight in weights.items() if "word_embeddings" in name)
        table[first] = torch.tensor([3e38, -3e38]).repeat(table.shape[1] // 2)  # their variance is past float32

    edit_weights(overflowing / "model.safetensors", overflow)
    return {
        "minilm": minilm,
        "qwen3": qwen3,
        "overflowing": overflowing,
        "clip": clip(root / "clip"),
    }


def api_workers(engine: tuple[str, ...]) -> int:
    return 2 if "--api-workers" in engine else 1


@pytest.fixture(scope="module", params=ENGINES)
def driven(request, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driven]:
    folder = tmp_path_factory.mktemp("server")
    models = [f"{name}={path}" for name, path in folders.items()]
    flags = ["--dtype", "float32", "--trust-request-chat-template", "--api-keys-file", str(key_file_of(folder, KEYS))]
    limits = ["--max-inputs-per-request", str(MAX_INPUTS), "--max-batch-tokens", str(SHORT_BATCH)]
    with serving(folder, *models, *flags, *limits, *request.param, command=LAUNCHER) as server:
        driven = Driven(server)
        trio.run(lambda: driven.learn(*folders, api_workers=api_workers(request.param)))
        yield driven


@pytest.fixture(scope="module", params=ENGINES)
def scripted_driven(request, scripted_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driven]:
    """A server whose forward passes wait, or raise an error, if they are told to."""
    folder = make_pipes(tmp_path_factory.mktemp("server"))
    with serving(folder, str(scripted_folder), *request.param, command=SCRIPTED) as server:
        driven = Driven(server)
        trio.run(lambda: driven.learn("scripted", api_workers=api_workers(request.param)))
        yield driven


def check_answer(case: HangingRequest, answer: httpx.Response) -> None:
    assert answer.status_code in {case.status, case.or_status}, answer.text[:500]
    if answer.status_code == 429:
        assert int(answer.headers["retry-after"]) > 0
    elif answer.status_code == 200:
        vectors = vectors_of(answer)
        assert len(vectors) == case.vectors
        assert np.isfinite(vectors).all()
        assert np.linalg.norm(vectors, axis=1).min() > 0
        if case.tokens is not None:
            assert answer.json()["usage"]["prompt_tokens"] == case.tokens
    else:
        error = answer.json()["error"]
        assert case.says
        assert case.says in (error if isinstance(error, str) else error["message"])


async def check(driven: Driven, case: HangingRequest) -> None:
    answers = await driven.send(case)
    await driven.check_next(case)
    for answer in answers:
        check_answer(case, answer)
    assert len(answers) == case.times
    assert case.status in {answer.status_code for answer in answers}
    await driven.check_well()


@pytest.mark.parametrize("case", [case for case in CASES if case.values[0].model != "scripted"])
async def test_a_request_is_answered_and_so_is_the_next(driven: Driven, case: HangingRequest):
    await check(driven, case)


@pytest.mark.parametrize("case", [case for case in CASES if case.values[0].model == "scripted"])
async def test_a_forward_pass_that_raises_an_error_fails_alone(scripted_driven: Driven, case: HangingRequest):
    await check(scripted_driven, case)


async def test_probes_are_answered_while_a_long_batch_is_computed(scripted_driven: Driven):
    server, pipes = scripted_driven.server, scripted_driven.server.log_path.parent
    async with server.waiting_request(pipes) as answers:
        begun = trio.current_time()
        async with scripted_driven.client() as client, trio.open_nursery() as nursery:

            async def probe() -> None:
                assert (await client.get(PROBES.path)).status_code == PROBES.status

            for _ in range(PROBES.times):
                nursery.start_soon(probe)
        assert trio.current_time() - begun < WITHIN_S
        await write(pipes / "go", "go")
    assert [answer.status_code for answer in answers] == [200]
    await scripted_driven.check_next(PROBES)
    await scripted_driven.check_well()


def test_the_page_has_the_answers_of_these_tests():
    assert PAGE.read_text() == what_hangs_others_page(), "run python -m tests.end_to_end.hanging_requests"
