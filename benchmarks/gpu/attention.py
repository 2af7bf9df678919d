"""Implementations of flash attention: full batches through the runner, without a server; also the process of one.

FA2 is built into torch. FA3 and FA4 are packages that torch activates. Nothing is compiled.
"""

from functools import partial
from typing import Any

import trio

from benchmarks.aim import Aim
from benchmarks.gpu.batch_stream import BatchStream
from benchmarks.gpu.batches import make_batch
from benchmarks.gpu.loaded_runner import LoadedRunner, runner_arguments
from benchmarks.gpu.part import Findings, Part, Subject
from benchmarks.gpu.part_process import PartProcessError, read_job, run_part_process, send_finding
from trio_pool_serve.runner.cuda import varlen
from trio_pool_serve.types import Embed

IMPLEMENTATIONS = ("FA2", "FA3", "FA4")
"""Their names in torch."""

LENGTHS = (50, 512)

WARM_UP_BATCHES = 5

SECONDS = 2.0


def aim_of(implementation: str, tokens: int) -> Aim:
    """Return the row of an implementation and a length."""
    return Aim(row=f"{implementation}: tokens/s of passes alone, rows of {tokens} tokens")


async def run(subject: Subject, findings: Findings) -> None:
    """Measure each implementation in a process of its own. Cancellation: the running process is terminated."""
    for name in IMPLEMENTATIONS:
        subject.note_step(name)
        job = {
            "implementation": name,
            "arguments": runner_arguments(subject.bert, subject.settings),
            "seconds": min(SECONDS, subject.settings.seconds),
        }
        try:
            await run_part_process("benchmarks.gpu.attention", job, partial(_note, findings, name))
        except PartProcessError as error:
            _note(findings, name, {"reason": str(error).splitlines()[0]})


def _note(findings: Findings, name: str, finding: dict[str, Any]) -> None:
    """Write down what a process has found: the model, a rate, or why the rates that are left are not measured."""
    if "model" in finding:
        findings.texts.append(f"{name}: {finding['model']}.")
    elif "reason" in finding:
        for aim in [aim_of(name, tokens) for tokens in LENGTHS]:
            if findings.values.get(aim, (None, ""))[0] is None:
                findings.not_measured(aim, finding["reason"])
    else:
        findings.measured(aim_of(name, finding["tokens"]), finding["tokens_per_s"])


PART = Part(
    name="attention",
    budget_s=35,
    run=run,
    aims=[aim_of(name, tokens) for name in IMPLEMENTATIONS for tokens in LENGTHS],
)


async def measure(job: dict[str, Any]) -> None:
    """Load the model with an implementation, and compute batches of rows of each length."""
    name = job["implementation"]
    if name != "FA2":
        from torch.nn.attention import activate_flash_attention_impl

        try:
            activate_flash_attention_impl(name)
        except ImportError as error:
            send_finding({"reason": f"package absent: {error}"})
            return
    varlen.FASTER_KERNELS = dict.fromkeys(varlen.FASTER_KERNELS, () if name == "FA2" else (name,))
    loaded = await LoadedRunner.load(job["arguments"])
    send_finding(loaded.describe())
    if name != "FA2" and f"attention by {name}" not in loaded.describe()["model"]:
        send_finding({"reason": "its output differs, or the GPU does not have it"})
        return
    for tokens in LENGTHS:
        rows = max(1, loaded.batch_tokens // tokens)
        batch = make_batch([tokens] * rows, (Embed(),))
        await BatchStream(loaded, batch).run(batches=WARM_UP_BATCHES)
        result = await BatchStream(loaded, batch).run(seconds=job["seconds"])
        send_finding({"tokens": tokens, "tokens_per_s": result.batches_per_s * rows * tokens})
    loaded.offload.close()


if __name__ == "__main__":
    trio.run(measure, read_job())
