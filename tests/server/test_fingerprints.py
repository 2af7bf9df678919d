"""The fingerprint of a model in servers of several processes, and after a restart."""

import re
from pathlib import Path

import pytest

from tests.conftest import client_of
from tests.models.model_families import write_family
from tests.server.server_process import ENGINE_PROCESS, launched

SEVERAL = ("--engine", "process", "--api-workers", "2")


async def fingerprints(tmp_path: Path, model: Path, *arguments: str) -> set[str]:
    """Return what a server says on many connections, in ``/v1/models`` and in the headers of responses."""
    found = set()
    async with launched(tmp_path, str(model), *arguments) as server:
        assert len(server.processes(ENGINE_PROCESS)) == (1 if arguments == SEVERAL else 0)
        for _ in range(12):
            async with client_of(server.url) as client:
                (card,) = (await client.get("/v1/models")).json()["data"]
                answer = await client.post("/v1/embeddings", json={"input": "hello"})
                found |= {card["fingerprint"], answer.headers["model-fingerprint"]}
        assert re.search(
            r"bfloat16 on cpu \(auto: native bfloat16\)|float32 on cpu( \(auto: no native bfloat16\))?,", server.log
        )
    return found


@pytest.mark.slow
async def test_all_processes_and_the_next_start_have_the_same_fingerprint_and_another_dtype_has_another(tmp_path):
    model = write_family(tmp_path / "model", "bert")
    (first,) = await fingerprints(tmp_path, model, *SEVERAL)
    moved = model.rename(tmp_path / "moved")
    assert await fingerprints(tmp_path, moved, "--engine", "local") == {first}
    (other,) = await fingerprints(tmp_path, moved, "--engine", "local", "--dtype", "float32", "--pooling", "cls")
    assert other != first
