"""Loads a model as a server would, and finds out what to say about it."""

import signal
import sys
import time
from collections.abc import Callable

import attrs
import msgspec
import trio
from attrs import evolve
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from trio_pool_serve.api.routes.models import tasks_of
from trio_pool_serve.checking.check_settings import CheckSettings
from trio_pool_serve.checking.measuring import Speed, lengths_for, measure_speed, peak_of_largest_batch
from trio_pool_serve.checking.model_report import (
    Memory,
    ModelReport,
    Refusal,
    accepted_by,
    kind_of,
    normalize_from,
    pooling_from,
    print_report,
)
from trio_pool_serve.config import BatchConfig, Config, LoggingConfig
from trio_pool_serve.engine.placement import replicas_of
from trio_pool_serve.engine.worker import Worker
from trio_pool_serve.errors import PoolServeError, unwrap_exception_groups
from trio_pool_serve.models.files.folder_files import read_folder_files
from trio_pool_serve.process_setup import open_service, with_engine_placement
from trio_pool_serve.runner.runner_description import RunnerDescription
from trio_pool_serve.service import Service
from trio_pool_serve.telemetry.process_usage import resident_bytes
from trio_pool_serve.types import Runner

INTERRUPTED = 128 + signal.SIGINT


def run_check(settings: CheckSettings) -> int:
    """Check a model and print the report; return the exit status: 1 if it cannot be served, 130 after Ctrl-C."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    report: ModelReport | Refusal
    try:
        with _open_progress(console) as progress:
            task = progress.add_task("")
            report = trio.run(check_model, settings, lambda step: progress.update(task, description=step))
    except KeyboardInterrupt:
        return INTERRUPTED
    except (PoolServeError, OSError) as error:
        report = Refusal(error=str(error))
    if settings.report.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(attrs.asdict(report)), indent=2).decode() + "\n")
    elif isinstance(report, ModelReport):
        print_report(report, Console(highlight=False))
    if isinstance(report, ModelReport):
        return 0
    console.print(f"trio-pool-serve: {report.error}", style="red", markup=False)
    return 1


def _open_progress(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


async def check_model(settings: CheckSettings, show: Callable[[str], object]) -> ModelReport:
    """Load the model in this process and return the report; ``show`` is called with what is being done.

    Raises ``ModelLoadError``, and ``EngineDeadError`` if it cannot compute. Cancellation: at once; a thread that loads
    or computes finishes by itself.
    """
    config = settings.config
    placed = await with_engine_placement(config)
    before = resident_bytes()
    began = time.monotonic()
    show("loading")
    with unwrap_exception_groups(PoolServeError):
        async with open_service(_in_this_process(config, placed)) as service:
            load_s = time.monotonic() - began
            memory = Memory(
                weights=_description(service).weight_bytes,
                resident_before=before,
                resident_after_load=resident_bytes(),
            )
            speed: list[Speed] = []
            if settings.report.measure:
                peak, speed = await _measure(service, show)
                memory = evolve(memory, peak_of_largest_batch=peak)
            return _report(service, config, memory, speed, load_s, placed)


def _in_this_process(config: Config, placed: Config) -> Config:
    # Only a server that computes in its own process may try other numbers of batches at a time.
    replicas = config.processes.replicas if placed.processes.computes_here else replicas_of(placed)
    return evolve(
        config,
        processes=evolve(config.processes, engine="local", api_workers=1, replicas=replicas),
        logging=LoggingConfig(log_level="error"),
        batch=BatchConfig(data_dir=""),  # a server's data folder is not for this process
    )


async def _measure(service: Service, show: Callable[[str], object]) -> tuple[int | None, list[Speed]]:
    model = service.model()
    like = model.engine.facts.probe_request
    if like is None:  # none of its heads computes made-up rows
        return None, []
    batches = _runner_of(service).concurrent_launches
    longest = model.renderer.max_model_len
    show("computing the largest batch")
    peak = await peak_of_largest_batch(model.engine, like, longest, batches_at_once=batches)
    speed = []
    for length in lengths_for(longest):
        show(f"measuring rows of {length} tokens")
        speed.append(await measure_speed(model.engine, like, length, batches_at_once=batches))
    return peak, speed


def _report(
    service: Service, config: Config, memory: Memory, speed: list[Speed], load_s: float, placed: Config
) -> ModelReport:
    model, description = service.model(), _description(service)
    folder, spec = model.folder, model.folder.spec
    tasks = tasks_of(folder)
    files = read_folder_files(folder.path)
    replicas = service.offload.launch if placed.processes.computes_here else replicas_of(placed)
    (source,) = config.sources
    return ModelReport(
        id=model.name,
        kind=kind_of(folder),
        architectures=files.architectures,
        model_type=folder.model_type,
        parameters=description.parameters,
        task=folder.task or tasks[0],
        tasks=tasks,
        accepts=accepted_by(model, config),
        scoring=spec.scoring,
        similarity=spec.similarity if spec.scoring == "vectors" else None,
        modules=[module.name for module in spec.modules],
        pooling=spec.pooling,
        pooling_from=pooling_from(folder, source.loading),
        normalize=spec.normalizes,
        normalize_from=normalize_from(folder, source.loading),
        dimensions=description.dimensions,
        labels=list(spec.labels),
        max_model_len=model.renderer.max_model_len,
        prompts=folder.prompts,
        default_prompt_name=folder.default_prompt_name,
        dtype=description.dtype,
        device=description.device,
        backend=description.backend,
        computation=", ".join(description.computation),
        fingerprint=model.computed_by.fingerprint,
        cosine_with_float32=model.engine.facts.cosine_with_float32,
        engine=placed.processes.engine,
        replicas=replicas,
        max_batch_tokens=model.engine.facts.max_batch_tokens,
        load_s=load_s,
        memory=memory,
        speed=speed,
        warnings=[spec.assumption] if spec.assumption else [],
    )


def _runner_of(service: Service) -> Runner:
    worker = service.default.engine.worker
    assert isinstance(worker, Worker)  # noqa: S101  (as ``_in_this_process`` says)
    return worker.loaded


def _description(service: Service) -> RunnerDescription:
    description: RunnerDescription | None = getattr(_runner_of(service), "description", None)
    assert description is not None  # noqa: S101  (loaded by what loads models by default)
    return description
