"""NVIDIA's Multi-Process Service, with which several engine processes compute on a GPU at the same time."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import trio

from benchmarks.gpu.part import Findings, Subject
from benchmarks.gpu.part_process import PartProcessError, run_part_process

CONTROL = "nvidia-cuda-mps-control"

START_S = 20.0

STOP_S = 10.0


@asynccontextmanager
async def open_mps(subject: Subject, findings: Findings) -> AsyncIterator[dict[str, str]]:
    """Run MPS for as long as the block, and say on the page whether it runs: without, engines take turns on the GPU.

    The value are variables for the processes that use it. Cancellation: the daemon is ended.
    """
    if subject.gpu is None or shutil.which(CONTROL) is None:
        missing = "there is no GPU" if subject.gpu is None else f"{CONTROL} is not installed"
        findings.texts.append(f"Time-sliced, without MPS: {missing}.")
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        try:
            problem = await _start({**variables, "CUDA_VISIBLE_DEVICES": subject.gpu.nvidia_smi_id})
            findings.texts.append(f"Time-sliced, without MPS: {problem}." if problem else f"With MPS: `{CONTROL} -d`.")
            yield {} if problem else variables
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(STOP_S):
                await _control(variables, stdin=b"quit\n", check=False)


async def _start(variables: Mapping[str, str]) -> str:
    """Start the daemon and compute on the only visible GPU through it; return why that is not possible, or nothing."""
    answers: list[dict[str, Any]] = []
    with trio.move_on_after(START_S) as scope:
        try:
            await _control(variables, "-d")
            asked = {"device": "cuda", "computes": True}
            await run_part_process("benchmarks.gpu.selected_gpu", asked, answers.append, environment=variables)
        except (subprocess.CalledProcessError, PartProcessError) as error:
            return str(error).splitlines()[0]
    if scope.cancelled_caught:
        return f"it cannot be used within {START_S:g} s"
    return f"through it, {answers[0]['reason']}" if "reason" in answers[0] else ""


async def _control(variables: Mapping[str, str], *arguments: str, **options: Any) -> None:
    # Not through pipes: the daemon would keep them open.
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    await trio.run_process([CONTROL, *arguments], env={**os.environ, **variables}, **quiet, **options)
