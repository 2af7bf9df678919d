"""``run-batch`` as a process: killed while it writes, stopped, and started again."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bulk.test_interruptions import committed
from tests.models.model_families import write_family
from tests.server.server_process import ROOT

LINES = 6000

COMMAND = (sys.executable, "-m", "trio_pool_serve", "run-batch")


def start(source: Path, target: Path, model: Path, *flags: str) -> "subprocess.Popen[str]":
    arguments = ["-i", source, "-o", target, "--model", model, "--dtype", "float32", "--device", "cpu"]
    return subprocess.Popen([*COMMAND, *arguments, *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True)


def wait_for_lines(process: "subprocess.Popen[str]", target: Path, lines: int) -> None:
    """Return when the output has so many lines."""
    while not target.exists() or target.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.002)


@pytest.mark.slow
def test_a_run_that_is_killed_and_stopped_again_and_again_writes_the_same_bytes(tmp_path: Path):
    model, source = write_family(tmp_path / "bert", name="bert"), tmp_path / "in.jsonl"
    chosen = random.Random(18)
    words = ["nursery", "task", "cancel", "scope", "channel"]
    with source.open("w") as file:
        for number in range(LINES):
            text = " ".join(chosen.choices(words, k=chosen.randint(0, 12)))
            line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/embeddings", "body": {"input": text or 5}}
            file.write(json.dumps(line) + "\n")
    whole, target = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    process = start(source, whole, model)
    assert re.findall("(.*) of 6,000 rows", process.communicate()[1])[-1] == "run-batch: 6,000"
    assert process.returncode == 3  # some inputs are not texts

    reached = 0
    expected = whole.read_bytes()
    for lines in sorted(chosen.sample(range(1, LINES - 2000), 3)):
        process = start(source, target, model)
        wait_for_lines(process, target, lines)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        before, reached = reached, committed(target).output_bytes
        assert before <= reached < len(expected)
        assert target.read_bytes()[:reached] == expected[:reached]
        assert len(target.read_bytes()) >= reached
    assert reached > 0

    process = start(source, target, model)
    wait_for_lines(process, target, target.read_bytes().count(b"\n") + 1)
    os.kill(process.pid, signal.SIGINT)
    said = process.communicate()[1]
    if process.returncode != 3:  # it was not faster
        assert process.returncode == 128 + signal.SIGINT
        assert "The same command resumes" in said
        process = start(source, target, model)
        process.communicate()
    assert process.returncode == 3
    assert target.read_bytes() == whole.read_bytes()
    assert len(whole.read_bytes().splitlines()) == LINES


@pytest.mark.slow
def test_flags_that_are_vllm_s_are_accepted_and_missing_ones_named(tmp_path: Path):
    missing = subprocess.run([*COMMAND, "-i", "in.jsonl"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert missing.returncode == 2
    assert "--output-file" in missing.stdout + missing.stderr
    process = start(
        tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path, "--max-log-len", "5", "--response-role", "assistant",
        "--enable-prompt-tokens-details", "--enable-force-include-usage", "--enable-metrics", "--url", "0.0.0.0",
        "--port", "0", "--output-tmp-dir", str(tmp_path), "--served-model-name", "m",
    )  # fmt: skip
    said = process.communicate()[1]
    assert process.returncode == 1
    assert "in.jsonl: No such file" in said
