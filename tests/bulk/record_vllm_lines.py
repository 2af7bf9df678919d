"""Run vLLM's ``run-batch`` on every line, and write what it does to vllm_lines.json.

Run by hand, when the lines change or vLLM does: ``python -m tests.bulk.record_vllm_lines /path/to/bin/vllm [kind …]``.
A line that vLLM does not accept ends its run, so each line is first decoded alone, as ``run-batch`` does.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bulk.vllm_lines import LINES
from tests.compatibility.record_vllm import ENVIRONMENT, OPTIONS
from tests.compatibility.vllm_folders import KINDS
from tests.kept_folders import keeping_in

PATH = Path(__file__).parent / "vllm_lines.json"

DECODE = """
import json, sys
from vllm.entrypoints.launchers.run_batch import BatchRequestInput
for line in json.load(sys.stdin):
    try:
        BatchRequestInput.model_validate_json(line.strip())
        print("RESULT null")
    except Exception as error:
        print("RESULT", json.dumps(type(error).__name__))
"""


def aborts(program: Path, lines: list[str]) -> list[str | None]:
    """Return for each line the class of the error with which it ends a run, ``None`` if it does not."""
    result = subprocess.run(
        [program.parent / "python", "-c", DECODE],
        input=json.dumps(lines).encode(), stdout=subprocess.PIPE, env=os.environ | ENVIRONMENT, check=True,
    )  # fmt: skip
    found = [line for line in result.stdout.decode().splitlines() if line.startswith("RESULT ")]
    return [json.loads(line.removeprefix("RESULT ")) for line in found]


def record(program: Path, kind: str, root: Path) -> dict[str, Any]:
    """Return what vLLM does with each line of a kind."""
    folder = KINDS[kind].write(root / kind.replace(" ", "_") / "model")
    ends = dict(zip(LINES[kind], aborts(program, list(LINES[kind].values())), strict=True))
    usable = [name for name in LINES[kind] if ends[name] is None]
    source, target = folder.parent / "in.jsonl", folder.parent / "out.jsonl"
    source.write_text("\n\n".join(LINES[kind][name] for name in usable) + "\n")
    arguments = ["-i", source, "-o", target, "--model", folder, *OPTIONS, *KINDS[kind].vllm]
    subprocess.run([program, "run-batch", *arguments], env=os.environ | ENVIRONMENT, check=True)
    written = dict(zip(usable, target.read_text().splitlines(), strict=True))
    return {name: written[name] if ends[name] is None else {"aborts": ends[name]} for name in LINES[kind]}


def main(program: str, *kinds: str) -> None:
    """Record some kinds, or all."""
    recorded = json.loads(PATH.read_text()) if PATH.exists() else {}
    version = subprocess.run(
        [program, "--version"], env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, check=True
    ).stdout.split()[-1]
    with tempfile.TemporaryDirectory() as root, keeping_in(Path(root) / "kept_folders"):
        for kind in kinds or tuple(LINES):
            recorded[kind] = record(Path(program), kind, Path(root))
            recorded["vllm"] = version.decode()
            PATH.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
