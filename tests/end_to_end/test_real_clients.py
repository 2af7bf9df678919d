"""The real model in real server processes, asked by real clients."""

import json
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import openai
import psutil
import pytest
import trio

from tests.end_to_end.comparison import cosines
from tests.end_to_end.texts import SPECIMENS, varied_texts
from tests.server.server_process import (
    API_PROCESS,
    ENGINE_PROCESS,
    ServerProcess,
    hypercorned,
    launched,
    scripted,
    serving,
)
from tests.torch_files import as_torch

TEXTS = varied_texts()
FEWER = len(SPECIMENS) + 5
"""The specimens and the texts that are far too long."""
TRUNCATE = {"truncate_prompt_tokens": -1}
NAMED = ("--served-model-name", "all-MiniLM-L6-v2")
WORST = {"float32": 0.999999, "bfloat16": 0.999}


@pytest.fixture(scope="session")
def oracle(minilm: Path) -> np.ndarray:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(minilm), device="cpu")
    return model.encode(TEXTS, convert_to_numpy=True)


async def ask_openai(server: ServerProcess, texts: list[str]) -> np.ndarray:
    """openai-python; it asks for base64 unless a format is given."""

    def ask() -> np.ndarray:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", timeout=120) as client:
            answer = client.embeddings.create(model="all-MiniLM-L6-v2", input=texts, extra_body=TRUNCATE)
            return np.array([item.embedding for item in answer.data], dtype=np.float32)

    return await trio.to_thread.run_sync(ask)


async def ask_httpx(server: ServerProcess, texts: list[str]) -> np.ndarray:
    """One request per text, sixteen at a time: every text rides in batches with others."""
    vectors: dict[int, list[float]] = {}
    limiter = trio.CapacityLimiter(16)

    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client, trio.open_nursery() as nursery:

        async def one(index: int) -> None:
            async with limiter:
                answer = await client.post("/v1/embeddings", json={"input": texts[index], **TRUNCATE})
            vectors[index] = answer.json()["data"][0]["embedding"]

        for index in range(len(texts)):
            nursery.start_soon(one, index)
    return np.array([vectors[index] for index in range(len(texts))], dtype=np.float32)


CLIENTS = (ask_openai, ask_httpx)


@pytest.fixture(scope="module")
def server(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The real model in an engine process, behind two API processes."""
    arguments = (*NAMED, "--dtype", "float32", "--engine", "process", "--api-workers", "2", "--log-format", "text")
    arguments += ("--enable-prompt-embeds",)
    with serving(tmp_path_factory.mktemp("server"), str(minilm), *arguments) as server:
        yield server


async def test_the_launcher_gives_every_client_the_vectors_of_sentence_transformers(server, oracle):
    for ask, count in zip(CLIENTS, (FEWER, len(TEXTS)), strict=True):
        assert cosines(await ask(server, TEXTS[:count]), oracle[:count]).min() >= WORST["float32"], ask.__name__


async def run_printed_curl_line(server: ServerProcess) -> None:
    await server.wait_logged("curl -sS http")
    (line,) = (line.strip() for line in server.log.splitlines() if line.strip().startswith("curl "))
    done = await trio.run_process(["bash", "-c", line], capture_stdout=True, stderr=subprocess.DEVNULL)
    assert len(json.loads(done.stdout)["data"][0]["embedding"]) == 384


def assert_only_engines_have_torch(server: ServerProcess, api_workers: int) -> None:
    answering = [psutil.Process(server.process.pid), *server.processes(API_PROCESS)]
    assert len(answering) == 1 + api_workers
    for process in answering:
        assert not [mapped.path for mapped in process.memory_maps() if "libtorch" in mapped.path]
    (engine,) = server.processes(ENGINE_PROCESS)
    assert [mapped.path for mapped in engine.memory_maps() if "libtorch" in mapped.path]


async def test_the_curl_line_that_is_printed_works_and_processes_that_answer_have_no_torch(server):
    await run_printed_curl_line(server)
    assert_only_engines_have_torch(server, api_workers=2)


@pytest.mark.slow
async def test_openai_s_client_sends_prompt_embeds_as_vllm_s_documentation_does_and_no_api_process_loads_torch(
    server, minilm, oracle
):
    """The bytes of ``torch.save`` in base64, in ``extra_body``, beside the empty text that the client insists on."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, layer = AutoTokenizer.from_pretrained(minilm), AutoModel.from_pretrained(minilm).get_input_embeddings()
    encoded = []
    for text in TEXTS[:FEWER]:
        token_ids = tokenizer(text, truncation=True, max_length=256, return_tensors="pt").input_ids
        encoded.append(b64encode(as_torch(layer(token_ids).squeeze(0))).decode())  # with its gradient, as there

    def ask() -> np.ndarray:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", timeout=120) as client:
            create = partial(client.embeddings.create, model="all-MiniLM-L6-v2", input="")
            answer = create(extra_body={"prompt_embeds": encoded})
            alone = create(extra_body={"prompt_embeds": encoded[0]})
            return np.array([item.embedding for item in [*alone.data, *answer.data]], dtype=np.float32)

    found = await trio.to_thread.run_sync(ask)
    assert cosines(found, np.concatenate([oracle[:1], oracle[:FEWER]])).min() >= WORST["float32"]
    assert_only_engines_have_torch(server, api_workers=2)


@pytest.mark.slow
async def test_in_bfloat16_the_vectors_are_nearly_those(tmp_path, minilm, oracle):
    arguments = ("--dtype", "bfloat16", "--engine", "process", "--log-format", "text", *NAMED)
    async with launched(tmp_path, str(minilm), *arguments) as server:
        assert cosines(await ask_httpx(server, TEXTS), oracle).min() >= WORST["bfloat16"]
        await run_printed_curl_line(server)
        assert_only_engines_have_torch(server, api_workers=0)


@pytest.mark.slow
async def test_plain_hypercorn_without_a_model_gives_every_client_the_vectors_of_the_packaged_one(tmp_path, oracle):
    async with hypercorned(tmp_path, "trio_pool_serve.asgi:app", env={"TRIO_POOL_SERVE_DTYPE": "float32"}) as server:
        for ask in CLIENTS:
            assert cosines(await ask(server, TEXTS[:FEWER]), oracle[:FEWER]).min() >= WORST["float32"], ask.__name__


async def test_a_unix_socket_serves_too(tmp_path, scripted_folder):
    socket = tmp_path / "server.sock"
    arguments = (str(scripted_folder), "--host", f"unix:{socket}", "--log-format", "text")
    async with scripted(tmp_path, *arguments, wait_ready=False) as server:
        await server.wait_logged("curl -sS --unix-socket")
        transport = httpx.AsyncHTTPTransport(uds=str(socket))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            assert (await client.post("/v1/embeddings", json={"input": "hello"})).status_code == 200
        server.signal()
        assert await server.wait_exit() == 0
    assert not socket.exists()
