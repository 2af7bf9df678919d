"""Ask vLLM every case, and write what it answers to vllm_answers.json.

Run by hand, when the cases change or vLLM does:
``python -m tests.compatibility.record_vllm /path/to/bin/vllm [kind …]``.
It starts vLLM once for each kind of model, which takes a minute each time.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.progress import Progress

from tests.compatibility.http_answer import answer_of, request_of
from tests.compatibility.vllm_cases import cases_of, key_of
from tests.compatibility.vllm_folders import KINDS
from tests.kept_folders import keeping_in

PATH = Path(__file__).parent / "vllm_answers.json"
PORT = 8190
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
OPTIONS = ("--runner", "pooling", "--served-model-name", "m", "--dtype", "float32", "--enforce-eager")


@contextmanager
def vllm_serving(program: str, folder: Path, arguments: Sequence[str]) -> Iterator[httpx.Client]:
    """Run vLLM on a folder until the block is left; gives a client of it."""
    command = [program, "serve", str(folder), "--port", str(PORT), *OPTIONS, *arguments]
    with (folder.parent / "vllm.log").open("w") as log:
        process = subprocess.Popen(
            command, env=os.environ | ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=120) as client:
            _wait_until_ready(client, process, Path(log.name))
            yield client
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def _wait_until_ready(client: httpx.Client, process: subprocess.Popen, log: Path) -> None:
    while True:
        if process.poll() is not None:
            raise SystemExit(f"vLLM has ended:\n{log.read_text()[-3000:]}")
        try:
            if client.get("/health").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)


def ask(client: httpx.Client, kind: str) -> dict[str, Any]:
    """Return the answers to the cases of a kind."""
    return {key_of(kind, case): answer_of(client.request(**request_of(case))) for case in cases_of(kind)}


def write_record(version: str, answers: dict[str, Any]) -> None:
    """Write the file, with a line for each answer."""
    lines = (
        f"  {json.dumps(key)}: {json.dumps(answer, ensure_ascii=False)}" for key, answer in sorted(answers.items())
    )
    body = ",\n".join(lines)
    PATH.write_text(f'{{\n "vllm": {json.dumps(version)},\n "answers": {{\n{body}\n }}\n}}\n')


def main(program: str, *kinds: str) -> None:
    """Record the answers for some kinds, or for all."""
    recorded = json.loads(PATH.read_text()) if PATH.exists() else {"vllm": "", "answers": {}}
    known = {key_of(kind, case) for kind in KINDS for case in cases_of(kind)}
    answers = {key: answer for key, answer in recorded["answers"].items() if key in known}
    with Progress() as progress, tempfile.TemporaryDirectory() as root, keeping_in(Path(root) / "kept_folders"):
        for kind in progress.track(kinds or tuple(KINDS), description="Kinds of model"):
            progress.console.print(kind)
            folder = KINDS[kind].write(Path(root) / kind.replace(" ", "_") / "model")
            with vllm_serving(program, folder, (*KINDS[kind].both, *KINDS[kind].vllm)) as client:
                version = client.get("/version").json()["version"]
                answers.update(ask(client, kind))
            write_record(version, answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
