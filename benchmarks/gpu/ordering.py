"""Accesses to device memory that are not ordered, and launches that wait for the device: there must be none.

The real runner is loaded and launches mixed batches, two in flight: under CUDA Sanitizer, which knows of each tensor
which streams have used it, with and without CUDA graphs; and under ``torch.cuda.set_sync_debug_mode("error")``.
``python -m benchmarks.gpu.ordering`` is the process that does it.
"""

import re
import sys
import traceback
from functools import partial
from typing import Any, Literal, TypeAlias

import trio

from benchmarks.aim import Aim
from benchmarks.gpu.loaded_runner import LoadedRunner, runner_arguments
from benchmarks.gpu.part import Findings, Subject
from benchmarks.gpu.part_process import PartProcessError, read_job, run_part_process, send_finding
from benchmarks.job_process import text_of

Check: TypeAlias = Literal["sanitizer", "synchronisation"]

UNORDERED = Aim(row="unordered accesses, without CUDA graphs", at_most=0)

UNORDERED_GRAPHS = Aim(row="unordered accesses, with CUDA graphs", at_most=0)

WAITING = Aim(row="launches that wait for the device", at_most=0)

SANITIZER = {"TORCH_CUDA_SANITIZER": "1"}

DETECTED = "CSAN detected"
"""Begins each of the sanitizer's complaints, on standard error: some raise where they are caught."""

ON_PURPOSE = "an unordered access on purpose"
"""On standard error before and after it."""

SHOWN_FRAMES = 6

SHOWN_CHARACTERS = 4000

ROUNDS = 3


async def run(subject: Subject, findings: Findings) -> None:
    """Run the checks side by side, whatever becomes of each. Raises ``PartProcessError`` if any has failed.

    Cancellation: at once; the process ends.
    """
    failed: list[str] = []

    async def check(aim: Aim, kind: Check, *, graphs: bool = True) -> None:
        job = {"check": kind, "arguments": runner_arguments(subject.bert, subject.settings), "graphs": graphs}
        found = findings.details.setdefault(aim.row, {})
        environment = SANITIZER if kind == "sanitizer" and subject.gpu is not None else {}
        try:
            written = await run_part_process("benchmarks.gpu.ordering", job, found.update, environment=environment)
        except PartProcessError as error:
            findings.not_measured(aim, str(error).splitlines()[0])
            findings.texts.append(f"{aim.row}:\n\n```\n{error}\n```")
            failed.append(aim.row)
        else:
            _judge(aim, subject, found, written, findings)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(check, UNORDERED, "sanitizer", graphs=False))
        nursery.start_soon(check, UNORDERED_GRAPHS, "sanitizer")
        nursery.start_soon(check, WAITING, "synchronisation")
    if failed:
        raise PartProcessError(f"failed: {'; '.join(failed)}")


def _judge(aim: Aim, subject: Subject, found: dict[str, Any], written: str, findings: Findings) -> None:
    launched = f"{found['launched']} batches; {found['model']}"
    if subject.gpu is None:
        findings.not_measured(aim, f"on CPU there are no streams; {launched}")
    elif aim is WAITING:
        findings.measured(aim, len(found["waited"]), launched)
        findings.texts += [f"A launch that waits for the device:\n\n```\n{text}\n```" for text in found["waited"][:2]]
    elif not found["is_watching"]:
        findings.not_measured(aim, "the sanitizer did not notice an access that was made unordered on purpose")
    else:
        complaints = complaints_of(written)
        findings.texts += [f"An unordered access:\n\n```\n{text[:SHOWN_CHARACTERS]}\n```" for text in complaints[:1]]
        if "raised" in found and not complaints:
            findings.not_measured(aim, "launches failed")
            findings.texts.append(f"{aim.row}:\n\n```\n{found['raised'][0]}\n```")
        else:
            findings.measured(aim, len(complaints), launched)


def complaints_of(written: str) -> list[str]:
    """Return the sanitizer's complaints on standard error, but for those of an access on purpose."""
    unintended = re.sub(f"{ON_PURPOSE}.*?{ON_PURPOSE}", "", written, flags=re.DOTALL)
    return [f"{DETECTED}{text}" for text in unintended.split(DETECTED)[1:]]


# -- in the process of its own ----------------------------------------------------------------------------


async def launch_all(loaded: LoadedRunner, *, in_this_thread: bool) -> list[str]:
    """Launch mixed batches, two in flight, and await them; return what the launches raised."""
    from benchmarks.gpu.batches import mixed_batches
    from trio_pool_serve.engine.local_device import MAX_IN_FLIGHT

    raised: list[str] = []
    batches = mixed_batches(loaded.batch_tokens)
    async with trio.open_nursery() as nursery:
        limiter = trio.CapacityLimiter(MAX_IN_FLIGHT)
        for number, batch in enumerate(batches * ROUNDS):
            await limiter.acquire_on_behalf_of(number)
            try:
                if in_this_thread:
                    handle = loaded.runner.launch(batch)
                else:
                    handle = await loaded.offload.run("launch", partial(loaded.runner.launch, batch))
            except Exception as error:
                raised.append(_where(error))
                limiter.release_on_behalf_of(number)
            else:
                nursery.start_soon(_finish, handle, limiter, number)
    send_finding({"launched": len(batches) * ROUNDS})
    return raised


async def _finish(handle: Any, limiter: trio.CapacityLimiter, number: int) -> None:
    await handle
    limiter.release_on_behalf_of(number)


def _where(error: Exception) -> str:
    frames = traceback.format_list(traceback.extract_tb(error.__traceback__)[-SHOWN_FRAMES:])
    return "".join([*frames, text_of(error)])


def is_watching(device: Any) -> bool:
    """Return whether the sanitizer notices that a tensor is written on one stream and on another, without order."""
    import torch
    from torch.cuda._sanitizer import CUDASanitizerErrors

    print(ON_PURPOSE, file=sys.stderr, flush=True)
    tensor = torch.zeros(1024, device=device)
    try:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            tensor.add_(1)
    except CUDASanitizerErrors:
        return True
    finally:
        print(ON_PURPOSE, file=sys.stderr, flush=True)
    return False


async def check_order(loaded: LoadedRunner) -> None:
    """Launch under the sanitizer, which watches only the thread that imported torch: everything is in this one."""
    import torch

    on_gpu = not loaded.is_on_cpu
    if on_gpu:
        send_finding({"is_watching": is_watching(loaded.runner.params.device)})
        # Operations that were captured count as run on the stream of the capture, which nothing waits for.
        torch.cuda.synchronize(loaded.runner.params.device)
    if raised := await launch_all(loaded, in_this_thread=True):
        send_finding({"raised": raised})


async def check_waiting(loaded: LoadedRunner) -> None:
    """Launch in the launch thread, with every operation that waits for the device an error."""
    import torch

    if raised := await launch_all(loaded, in_this_thread=False):  # what is allocated on first use waits, and may
        raise RuntimeError(raised[0])
    if not loaded.is_on_cpu:
        torch.cuda.set_sync_debug_mode("error")
    send_finding({"waited": await launch_all(loaded, in_this_thread=False)})
    if not loaded.is_on_cpu:
        torch.cuda.set_sync_debug_mode("default")


async def main() -> None:
    """Do the job."""
    job = read_job()
    order = job["check"] == "sanitizer"
    loaded = await LoadedRunner.load(job["arguments"], in_this_thread=order, graphs=job["graphs"])
    send_finding(loaded.describe())
    await (check_order(loaded) if order else check_waiting(loaded))


if __name__ == "__main__":
    trio.run(main)
