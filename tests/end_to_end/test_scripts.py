"""The two commands of the README, on a fresh clone without an environment. Minutes long: ``scripts/test rest``."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import client_of
from tests.server.server_process import ROOT, free_port, started

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clone") / "checkout"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(path)], check=True)
    return path


@pytest.mark.parametrize("run", ["first", "second"])
async def test_scripts_serve_needs_nothing_but_itself(clone, tmp_path, run):
    port = free_port()
    command = [str(clone / "scripts" / "serve"), "--port", str(port)]
    environment = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"}
    with started(command, port, tmp_path / "server.log", environment) as server:
        await server.wait_until("/readyz", limit_s=900)
        async with client_of(server.url) as client:
            answer = await client.post("/v1/embeddings", json={"input": "Hello, world"})
        assert answer.json()["model"] == "all-MiniLM-L6-v2"
        assert len(answer.json()["data"][0]["embedding"]) == 384
        assert ("installing" in server.log) == (run == "first")
        server.signal()
        assert await server.wait_exit() == 0


def test_scripts_serve_passes_model_and_flags_through(clone, scripted_folder):
    environment = {**os.environ, "TRIO_POOL_SERVE_LOG_LEVEL": "error"}
    flags = ["--served-model-name", "mine", "--no-such-flag"]
    for arguments in ([*flags], [str(scripted_folder), *flags]):
        done = subprocess.run(
            [str(clone / "scripts" / "serve"), *arguments], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert "--no-such-flag" in done.stderr
        assert "served-model-name" not in done.stderr
