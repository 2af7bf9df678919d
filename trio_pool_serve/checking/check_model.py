"""Loads a model as a server would, measures it, and reports how it would be served."""

import math
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import trio
from attrs import asdict, evolve
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from trio_pool_serve.api.routes.models import main_task_of, tasks_of
from trio_pool_serve.checking.model_report import (
    Memory,
    ModelReport,
    Refusal,
    Speed,
    accepted_by,
    kind_of,
    normalize_from,
    particulars_of,
    pooling_from,
    print_report,
    weights_of,
)
from trio_pool_serve.config import BatchConfig, Config, LoggingConfig
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.gpus import find_gpus, sharing_by_mps
from trio_pool_serve.engine.process_placement import replicas_of
from trio_pool_serve.engine.worker import Worker
from trio_pool_serve.errors import PoolServeError, unwrap_exception_groups
from trio_pool_serve.models.files.folder_files import read_folder_files
from trio_pool_serve.process_setup import open_service, with_engine_placement
from trio_pool_serve.processes.allocator import resident_bytes
from trio_pool_serve.service import Service
from trio_pool_serve.telemetry.start_display import show_steps_with
from trio_pool_serve.types import PoolingRequest, RenderedPrompt

INTERRUPTED = 128 + signal.SIGINT

LENGTHS = (16, 128, 512, 2048)
"""Tokens of the rows that are computed; the model's maximum replaces longer lengths."""

SECONDS = 1.0
"""Time for rows of one length, or for one batch if that takes longer."""

SECONDS_ALONE = 0.25
"""Time for single rows of one length."""

ROWS_ALONE = 3
"""Minimum number of single rows of one length."""

OF_THE_REPORT = {"--json", "--measure", "--no-measure"}
"""Flags of ``check`` that ``serve`` does not have."""


def run_check(config: Config, arguments: Sequence[str], *, measure: bool, as_json: bool) -> int:
    """Check a model and print the report; return the exit status: 1 if it cannot be served, 130 after Ctrl-C.

    ``arguments``: of the command line, for the command that serves the model.
    """
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    report: ModelReport | Refusal
    try:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("")
            show_steps_with(lambda step: progress.update(task, description=step))
            check = partial(check_model, config, lambda step: progress.update(task, description=step), measure=measure)
            report = evolve(trio.run(check), command=serve_command(arguments))
    except KeyboardInterrupt:
        return INTERRUPTED
    except (PoolServeError, OSError) as error:
        report = Refusal(error=str(error))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(asdict(report)), indent=2).decode() + "\n")
    elif isinstance(report, ModelReport):
        print_report(report, Console(highlight=False))
    if isinstance(report, ModelReport):
        return 0
    console.print(f"{config.sources[0].name} does not work: {report.error}", style="red", markup=False)
    return 1


def serve_command(arguments: Sequence[str]) -> str:
    """Return the command that serves the model of a check, given the check's arguments."""
    return shlex.join(("trio-pool-serve", "serve", *(each for each in arguments if each not in OF_THE_REPORT)))


async def check_model(config: Config, show: Callable[[str], object], *, measure: bool = True) -> ModelReport:
    """Load the model in this process and return the report; ``show`` is called with each step.

    ``measure``: compute rows of several lengths and the largest batch.

    Raises ``ModelLoadError``, and ``EngineDeadError`` if it cannot compute. Cancellation: at once; threads that load or
    compute finish their work.
    """
    placed = await with_engine_placement(config)
    gpus = await find_gpus(config.loading) if placed.processes.engine == "process" else []
    before = resident_bytes()
    began = time.monotonic()
    show("loading")
    with unwrap_exception_groups(PoolServeError):
        async with open_service(_in_this_process(config, placed)) as service:
            load_s, loaded = time.monotonic() - began, resident_bytes()
            peak, speed = await _measure(service, show) if measure else (None, [])
            memory = Memory(
                weights=service.model().engine.facts.weight_bytes,
                resident_before=before,
                resident_after_load=loaded,
                peak_of_largest_batch=peak,
            )
            return _report(service, config, memory, speed, load_s, placed, sharing_by_mps() if gpus else "")


def _in_this_process(config: Config, placed: Config) -> Config:
    # Only a server that computes in its own process tries other numbers of concurrent batches.
    replicas = config.processes.replicas if placed.processes.computes_here else replicas_of(placed)
    return evolve(
        config,
        processes=evolve(config.processes, engine="local", api_workers=1, replicas=replicas),
        logging=LoggingConfig(log_level="error"),
        batch=BatchConfig(data_dir=""),  # a server's data folder is not for this process
    )


async def _measure(service: Service, show: Callable[[str], object]) -> tuple[int | None, list[Speed]]:
    model = service.model()
    facts = model.engine.facts
    like = facts.probe_request
    if like is None:  # none of its heads can compute made-up rows
        return None, []
    batches = facts.concurrent_launches
    longest = model.renderer.max_model_len
    if isinstance(model.engine.devices, Worker) and not model.engine.devices.improved.is_set():
        show("compiling")
        await model.engine.devices.improved.wait()
    show("computing the largest batch")
    peak = await peak_of_largest_batch(model.engine, like, longest, batches_at_once=batches)
    speed = []
    for length in sorted({min(length, longest) for length in LENGTHS}):
        show(f"measuring rows of {length} tokens")
        speed.append(await measure_speed(model.engine, like, length, batches_at_once=batches))
    return peak, speed


async def measure_speed(engine: Engine, like: PoolingRequest, length: int, *, batches_at_once: int) -> Speed:
    """Compute rows of ``length`` tokens for about ``SECONDS``.

    ``like`` is a row that the model can compute. Raises as ``Engine.submit_all``. Cancellation: at once.
    """
    alone_s = await _seconds_alone(engine, row_of(like, length))
    rows = [row_of(like, length)] * max(1, min(engine.facts.max_batch_tokens // length, math.ceil(SECONDS / alone_s)))
    done = 0
    began = time.perf_counter()

    async def keep_computing() -> None:
        nonlocal done
        while time.perf_counter() < began + SECONDS:
            done += len(await engine.submit_all(rows))

    async with trio.open_nursery() as nursery:
        for _ in range(batches_at_once + 1):  # one more, so that a batch waits when another is done
            nursery.start_soon(keep_computing)
    rows_per_s = done / (time.perf_counter() - began)
    return Speed(tokens=length, rows_per_s=rows_per_s, tokens_per_s=rows_per_s * length, ms_alone=alone_s * 1000)


async def _seconds_alone(engine: Engine, row: PoolingRequest) -> float:
    took: list[float] = []
    while len(took) < ROWS_ALONE or sum(took) < SECONDS_ALONE:
        began = time.perf_counter()
        await engine.submit(row)
        took.append(time.perf_counter() - began)
        if took[-1] > SECONDS:
            break
    return median(took)


async def peak_of_largest_batch(
    engine: Engine, like: PoolingRequest, max_model_len: int, *, batches_at_once: int
) -> int:
    """Return the peak of resident bytes while ``batches_at_once`` batches of ``max_batch_tokens`` are computed.

    Raises as ``Engine.submit_all``. Cancellation: at once.
    """
    length = min(max_model_len, engine.facts.max_batch_tokens)
    rows = [row_of(like, length)] * (engine.facts.max_batch_tokens // length)
    reset_peak()
    async with trio.open_nursery() as nursery:
        for _ in range(batches_at_once):
            nursery.start_soon(engine.submit_all, rows)
    return peak_bytes()


def row_of(like: PoolingRequest, tokens: int) -> PoolingRequest:
    """Return a row of ``tokens`` tokens, each the first one of ``like``, with the same params."""
    prompt = RenderedPrompt(np.full(tokens, like.prompt.token_ids[0], dtype=np.int32))
    return msgspec.structs.replace(like, prompt=prompt)


def peak_bytes() -> int:
    """Return the most bytes that were resident since ``reset_peak``."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    """Set the peak to the present resident memory. If the kernel forbids it, the peak of the whole process remains."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5)


def _report(
    service: Service,
    config: Config,
    memory: Memory,
    speed: list[Speed],
    load_s: float,
    placed: Config,
    mps: str,
) -> ModelReport:
    model, facts = service.model(), service.model().engine.facts
    folder, spec = model.folder, model.folder.spec
    replicas = service.offload.launch if placed.processes.computes_here else replicas_of(placed)
    (source,) = config.sources
    return ModelReport(
        id=model.name,
        kind=kind_of(folder),
        architectures=read_folder_files(folder.path).architectures,
        model_type=folder.model_type,
        weights=weights_of(folder, source.loading),
        parameters=facts.parameters,
        task=main_task_of(folder),
        tasks=tasks_of(folder),
        accepts=accepted_by(model, config),
        scoring=spec.scoring,
        similarity=spec.similarity if spec.scoring == "vectors" else None,
        modules=[module.name for module in spec.modules],
        pooling=spec.pooling,
        pooling_from=pooling_from(folder, source.loading),
        normalize=spec.normalizes or [module.name for module in spec.modules][-1:] == ["Normalize"],
        normalize_from=normalize_from(folder, source.loading),
        dimensions=facts.dimensions,
        labels=list(spec.labels),
        particulars=particulars_of(folder),
        max_model_len=model.renderer.max_model_len,
        prompts=folder.prompts,
        default_prompt_name=folder.default_prompt_name,
        dtype=facts.computed_by.dtype,
        device=facts.device,
        backend=facts.computed_by.backend,
        computation=", ".join(facts.computation),
        fingerprint=model.computed_by.fingerprint,
        cosine_with_float32=facts.cosine_with_float32,
        engine=placed.processes.engine,
        replicas=replicas,
        max_batch_tokens=facts.max_batch_tokens,
        load_s=load_s,
        memory=memory,
        speed=speed,
        warnings=[spec.assumption] if spec.assumption else [],
        mps=mps,
    )
