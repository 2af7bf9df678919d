"""The tutorial is done as it stands there, with the model's package and a small random reranker in place of the hub."""

import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

from tests.models.classifier_families import write_reranker
from tests.page_blocks import blocks_of
from tests.server.server_process import LAUNCHER, ROOT, free_port, started

SERVE = "scripts/serve"
URL = "http://127.0.0.1:8000"
LOCAL = {"TRIO_POOL_SERVE_ENGINE": "local"}
"""As on a laptop without a GPU, where models are computed in the API process."""

EMBEDDER, RERANKER = "sentence-transformers/all-MiniLM-L6-v2", "cross-encoder/ms-marco-MiniLM-L6-v2"


@pytest.mark.slow
def test_every_step_of_the_tutorial_does_what_it_says(tmp_path: Path, minilm: Path):
    models = {EMBEDDER: str(minilm), RERANKER: str(write_reranker(tmp_path / "reranker", minilm))}
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / ".venv").symlink_to(sys.prefix)
    port = free_port()
    here, printed, starts, ranking = clone, "", 0, ""

    def moved(text: str) -> str:
        for hub_id, folder in models.items():
            text = text.replace(f"={hub_id}", f"={folder}")
        return text.replace(URL, f"http://127.0.0.1:{port}")

    with ExitStack() as running:
        for block in blocks_of(ROOT / "docs/tutorial.md"):
            if block.text.startswith(SERVE):
                running.close()
                words = shlex.split(moved(block.text).replace("\\\n", " "))[1:] or [f"all-MiniLM-L6-v2={minilm}"]
                command = [*LAUNCHER, *words, "--port", str(port)]
                server = running.enter_context(started(command, port, tmp_path / f"{starts}.log", LOCAL))
                trio.run(server.wait_until, "/readyz")
                starts += 1
            elif block.language == "sh":
                lines = f"{moved(block.text)}\npwd > {tmp_path}/here"
                done = subprocess.run(["bash", "-ec", lines], cwd=here, capture_output=True, text=True, timeout=120)
                assert done.returncode == 0, (block.text, done.stderr, server.log)
                here, printed = Path((tmp_path / "here").read_text().strip()), done.stdout
                ranking = printed if "rerank.py" in block.text else ranking
            elif block.language == "python":
                assert block.file_name
                (clone / block.file_name).write_text(moved(block.text))
            else:
                assert (block.language, block.text) == ("text", printed)
    assert starts == 2
    scores, documents = zip(*(line.split("  ", 1) for line in ranking.splitlines()), strict=True)
    assert sorted(scores, key=float, reverse=True) == [*scores]
    indexed = (clone / "search/index.py").read_text()
    assert sum(f'"{document}"' in indexed for document in set(documents)) == 3
