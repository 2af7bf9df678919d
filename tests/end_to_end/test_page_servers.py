"""What README, the page of the Batch API and the page of engines on other machines do with a server happens so.

Models that compute by a script, or the model's package, stand for those of the hub.
"""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import trio

from tests.conftest import client_of
from tests.cpu_backend import BY_TORCH_FLAGS
from tests.model_folders import write_scripted_folder
from tests.models.classifier_families import write_reranker
from tests.page_blocks import blocks_of
from tests.server.server_process import (
    ENGINE_PROGRAM,
    LAUNCHER,
    ROOT,
    SCRIPTED_ASGI,
    ServerProcess,
    free_port,
    hypercorned,
    launched,
    scripted,
    started,
)

URL = "http://127.0.0.1:8000"
README = [block.text for block in blocks_of(ROOT / "README.md")]
ENGINES, API, HOSTS = [block.text for block in blocks_of(ROOT / "docs/hosts.md")]
LOCAL = {"TRIO_POOL_SERVE_ENGINE": "local"}


def blocks_with(text: str) -> list[str]:
    return [block for block in README if text in block]


def words_of(line: str) -> list[str]:
    return shlex.split(line.replace("\\\n", " "))


async def printed_by(language: str, program: str, server: ServerProcess, folder: Path) -> str:
    """Run a program of a page in a folder; return what it prints."""
    command = [sys.executable, "-c"] if language == "python" else ["bash", "-ec"]
    done = await trio.run_process(
        [*command, program.replace(URL, server.url)], cwd=folder, capture_stdout=True, capture_stderr=True, check=False
    )
    assert done.returncode == 0, (done.stderr.decode(), server.log)
    return done.stdout.decode()


def test_every_block_of_the_readme_is_run_by_a_test():
    """The first one by the tutorial's test, and in a fresh clone by ``test_scripts.py``; the last one runs this."""
    assert README[0] == "scripts/serve\n"
    assert README[-1] == "scripts/test fast\nscripts/test\n"
    of_others = ("/v1/embeddings", "from openai", "--port 8080", "reranker=", "/v1/rerank", "trio-pool-serve embed")
    assert [len(blocks_with(text)) for text in of_others] == [1] * len(of_others)
    assert len(README) == 2 + len(of_others)


@pytest.mark.slow
async def test_the_readme_serves_another_model_with_flags(tmp_path: Path):
    line, shows_help = blocks_with("--port 8080")[0].splitlines()
    folder = write_scripted_folder(tmp_path / "model")
    words = [str(folder) if word == "path/or/hub-id" else word for word in words_of(line)[1:]]
    words.remove("--port")
    words.remove("8080")
    async with scripted(tmp_path, *words) as server, client_of(server.url) as client:
        assert (await client.post("/v1/embeddings", json={"input": "hello"})).status_code == 200
    assert words_of(shows_help) == ["scripts/serve", "--help"]
    done = await trio.run_process([*LAUNCHER, "--help"], cwd=ROOT, capture_stdout=True)
    assert b"--dtype" in done.stdout


async def test_the_readme_s_clients_get_vectors(tmp_path: Path, minilm: Path):
    flags = (f"all-MiniLM-L6-v2={minilm}",)
    async with launched(tmp_path, *flags, env=LOCAL) as server:
        answer = json.loads(await printed_by("sh", blocks_with("/v1/embeddings")[0], server, tmp_path))
        assert len(answer["data"][0]["embedding"]) == 384
        printed = await printed_by("python", blocks_with("from openai")[0], server, tmp_path)
        assert printed == "2 384\n"
        async with client_of(server.url) as client:
            assert (await client.get("/console")).status_code == (await client.get("/docs")).status_code == 200


@pytest.mark.slow
async def test_the_readme_serves_a_reranker_beside_another_model(tmp_path: Path, minilm: Path):
    (serve,), (request,) = blocks_with("reranker="), blocks_with("/v1/rerank")
    models = {"all-MiniLM-L6-v2": minilm, "reranker": write_reranker(tmp_path / "reranker", minilm)}
    words = [f"{word.partition('=')[0]}={models[word.partition('=')[0]]}" for word in words_of(serve)[1:]]
    async with launched(tmp_path, *words, env=LOCAL) as server:
        answer = json.loads(await printed_by("sh", request, server, tmp_path))
        assert sorted(result["index"] for result in answer["results"]) == [0, 1]


async def test_the_documented_command_of_hypercorn_starts_a_server(tmp_path: Path):
    pages = "\n".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    (command,) = set(re.findall(r"^TRIO_POOL_SERVE_MODEL=\S+ hypercorn .*\\\n.*", pages, re.M))
    name, *words = words_of(command.replace("=", " ", 1))
    assert (name, *words[:2]) == ("TRIO_POOL_SERVE_MODEL", "MODEL", "hypercorn")
    assert words[2:4] == ["--config", "docs/hypercorn.toml"]
    assert (words[4:6], words[-1]) == (["--worker-class", "trio"], "trio_pool_serve.asgi:app")
    model = str(write_scripted_folder(tmp_path / "model"))
    async with hypercorned(tmp_path, SCRIPTED_ASGI, env={name: model}) as server, client_of(server.url) as client:
        assert (await client.post("/v1/embeddings", json={"input": "hello"})).status_code == 200


@pytest.mark.slow
def test_the_readme_s_command_computes_a_table(tmp_path: Path, minilm: Path):
    words = [str(minilm) if word == "path/or/hub-id" else word for word in words_of(blocks_with("embed texts")[0])]
    pq.write_table(pa.table({"text": ["Hello, world", "Good night, moon"]}), tmp_path / "texts.parquet")
    command = [sys.executable, "-m", "trio_pool_serve", *words[1:], *BY_TORCH_FLAGS]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    vectors = pq.read_table(tmp_path / "vectors.parquet")["embedding"]
    assert [*map(len, vectors)] == [384, 384]


@pytest.mark.slow
async def test_the_page_of_the_batch_api_computes_a_file(tmp_path: Path):
    page = (ROOT / "docs/batch-api.md").read_text()
    (program,) = [block.text for block in blocks_of(ROOT / "docs/batch-api.md")]
    line = page.partition("A line is `")[2].partition("`")[0]
    (tmp_path / "requests.jsonl").write_text(line)
    folder = write_scripted_folder(tmp_path / "model")
    async with scripted(tmp_path, f"name={folder}") as server:
        printed = await printed_by("python", program.replace("sleep(5)", "sleep(0.1)"), server, tmp_path)
    (answer,) = [json.loads(each) for each in printed.splitlines() if each]
    assert (answer["custom_id"], answer["response"]["status_code"], answer["error"]) == ("row-1", 200, None)
    assert answer["response"]["body"]["data"][0]["embedding"]


@pytest.fixture
def moved(tmp_path: Path) -> Callable[[str], str]:
    """Replaces the addresses, the model and the key of the page of hosts by those of this test."""
    model = write_scripted_folder(tmp_path / "model")
    addresses = {f"10.0.0.{number}:9000": f"127.0.0.1:{free_port()}" for number in (2, 3, 4)}

    def moved(text: str) -> str:
        for old, new in {**addresses, "NAME=MODEL": f"name={model}", "engine.key": f"{tmp_path}/engine.key"}.items():
            text = text.replace(old, new)
        return text.replace(" KEY", " console-key")

    return moved


@pytest.mark.slow
async def test_the_page_of_hosts_computes_on_engines_and_changes_them(tmp_path: Path, moved: Callable[[str], str]):
    make_key, engine = ENGINES.splitlines()
    await trio.run_process(["bash", "-ec", moved(make_key)])
    with contextlib.ExitStack() as engines:
        for number in (2, 3, 4):
            words = words_of(moved(engine.replace("10.0.0.2", f"10.0.0.{number}")))
            assert words[:2] == ["trio-pool-serve", "engine"]
            command = [*ENGINE_PROGRAM, *words[2:]]
            await engines.enter_context(started(command, 0, tmp_path / f"{number}.log", {})).wait_logged("listening on")
        flags = [*words_of(moved(API))[2:], "--api-key", "console-key"]
        async with scripted(tmp_path, *flags) as server:
            headers = {"authorization": "Bearer console-key"}
            async with client_of(server.url) as client:
                answer = await client.post("/v1/embeddings", json={"input": "hello"}, headers=headers)
                assert answer.status_code == 200
            for line in moved(HOSTS).splitlines():
                words = words_of(line)
                assert words[:2] == ["trio-pool-serve", "hosts"]
                url = [] if "--url" in words else ["--url", URL]
                await printed_by(
                    "sh", shlex.join([sys.executable, "-m", "trio_pool_serve", *words[1:], *url]), server, ROOT
                )
            async with client_of(server.url) as client:
                hosts = (await client.get("/engine_hosts", headers=headers)).json()["hosts"]
            drained, added = (moved(f"10.0.0.{number}:9000") for number in (2, 4))
            states = {host["host"]: [engine["state"] for engine in host["engines"]] for host in hosts}
            assert states[drained] == ["draining"]
            assert added in states
