"""The commands of the pages about commands and about models at run time do what the pages say.

The servers compute by a script; models of the pages are small folders here.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.api.serving import key_file_of
from tests.conftest import client_of
from tests.model_folders import write_scripted_folder
from tests.models.model_families import write_family
from tests.page_blocks import blocks_of
from tests.server.server_process import ROOT, scripted

PROGRAM = "trio-pool-serve"
COMMANDS = [line for block in blocks_of(ROOT / "docs/commands.md") for line in block.text.splitlines()]
CHECKS, CONVERSIONS, BENCHES, COMPLETIONS = [
    [line for line in COMMANDS if line.startswith(f"{PROGRAM} {name} ")]
    for name in ("check", "convert", "bench", "completion")
]


def run_command(words: list[str], **env: str) -> str:
    """Run the words behind the program's name; return what they print."""
    command = [sys.executable, "-m", "trio_pool_serve", *words[1:]]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "COLUMNS": "120", **env}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, (words, done.stderr, done.stdout)
    return done.stdout


def json_documents(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects that stand one after the other in a text."""
    while text := text.lstrip():
        document, end = json.JSONDecoder().raw_decode(text)
        yield document
        text = text[end:]


def test_every_command_of_the_page_is_run_here():
    assert [*CHECKS, *CONVERSIONS, *BENCHES, *COMPLETIONS] == COMMANDS
    assert (len(CHECKS), len(CONVERSIONS), len(BENCHES), len(COMPLETIONS)) == (1, 1, 3, 1)


@pytest.mark.slow
def test_check_prints_what_the_page_lists(tmp_path: Path):
    model = write_family(tmp_path / "model", "bert")
    words = [str(model) if word == "path/or/hub-id" else word for word in shlex.split(CHECKS[0])]
    report = run_command([*words, "--no-measure"], TRIO_POOL_SERVE_BACKEND="torch")
    for listed in ("works: embedding", "BertModel", "mean", "torch", "48 tokens", "weights"):
        assert listed in report, report


@pytest.mark.slow
def test_convert_says_what_was_decided_and_has_nothing_to_do_the_second_time(tmp_path: Path):
    pytest.importorskip("openvino")
    model = write_family(tmp_path / "model", "bert")
    words = [str(model) if word == "path/or/hub-id" else word for word in shlex.split(CONVERSIONS[0])]
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TRIO_POOL_SERVE_BACKEND": "openvino"}
    assert "by OpenVINO; saved in" in run_command([*words, "--dtype", "float32"], **env)
    (record,) = (tmp_path / "cache").rglob("model-[0-9a-f]*/record.json")
    written = record.stat().st_mtime_ns
    assert "by OpenVINO; saved in" in run_command([*words, "--dtype", "float32"], **env)
    assert record.stat().st_mtime_ns == written


@pytest.mark.slow
async def test_bench_measures_a_server_and_compares_several(tmp_path: Path):
    async with scripted(tmp_path, str(write_scripted_folder(tmp_path / "model"))) as server:
        for line in BENCHES:
            words = [server.url if word.startswith("http://127.0.0.1:800") else word for word in shlex.split(line)]
            urls = words.count(server.url)
            short = ["--duration", "0.3"] if "--duration" not in words else []
            words = ["0.3" if word == "30" else word for word in words]
            result = tmp_path / "bench.json"
            words += [*short, "--json", str(result)]
            printed = await trio.to_thread.run_sync(run_command, words)
            assert "p99" in printed
            assert len(json.loads(result.read_text())["servers"]) == urls


def test_completion_prints_a_script_for_the_shell():
    script = run_command(shlex.split(COMPLETIONS[0]))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert PROGRAM in script


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["admin = true", ""], ids=["admin", "other"])
async def test_a_key_with_admin_loads_a_model_and_deletes_it_as_the_page_does(tmp_path: Path, scope: str):
    blocks = blocks_of(ROOT / "docs/models-at-run-time.md")
    serve, requests = [block.text for block in blocks if block.language != "json"]
    minilm, bge = (str(write_scripted_folder(tmp_path / name)) for name in ("minilm", "bge"))
    keys = key_file_of(tmp_path, f'[operators]\nkey = "ADMIN-KEY"\n{scope}\n')
    words = shlex.split(serve.replace("/models/all-MiniLM-L6-v2", minilm).replace("keys.toml", str(keys)))
    assert words[:2] == [PROGRAM, "serve"]
    async with scripted(tmp_path, *words[2:]) as server, client_of(server.url) as client:
        moved = requests.replace("http://localhost:8000", server.url).replace("BAAI/bge-small-en-v1.5", bge)
        done = await trio.run_process(["bash", "-ec", moved], capture_stdout=True, capture_stderr=True)
        loaded, deleted = json_documents(done.stdout.decode())
        if scope:
            assert (loaded["id"], loaded["state"]) == ("bge", "loaded")
            assert deleted["id"] == "bge"
        else:
            assert loaded["error"]["code"] == deleted["error"]["code"] == 403
        listed = await client.get("/v1/models", headers={"Authorization": "Bearer ADMIN-KEY"})
        assert [card["id"] for card in listed.json()["data"]] == ["minilm"]
