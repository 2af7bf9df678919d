"""Where models compute, how the process of a service is configured, and ``open_service``."""

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal, TypedDict

import trio
from attrs import evolve

from trio_pool_serve.config import BatchConfig, Config, LoggingConfig, ModelConfig, ProcessesConfig, SchedulingConfig
from trio_pool_serve.config.model_config import BackendChoice, Dtype, LongText, Pooling
from trio_pool_serve.config.setting import plain_message
from trio_pool_serve.engine.gpus import Gpu, find_gpus
from trio_pool_serve.engine.process_placement import default_placement, has_gpu, with_replicas
from trio_pool_serve.errors import EngineDeadError, PoolServeError, unwrap_exception_groups
from trio_pool_serve.models.folder import peek_folder
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.processes.allocator import freeze_objects, prepare_for_loading
from trio_pool_serve.processes.large_imports import forbid_torch
from trio_pool_serve.service import Service
from trio_pool_serve.threads.offload import NICENESS, Offload, limit_openmp_spinning, relative_niceness

SWITCH_INTERVAL_S = 0.0005
"""Time for which a thread holds the interpreter lock while the event loop waits: a tenth of Python's default."""

PEEK_S = 1.0
"""Time limit for reading the models' small files before the server listens; a disk may be slow."""


class ModelSettings(TypedDict, total=False):
    """Settings of a model: the flags of ``trio-pool-serve serve`` of these names, with their defaults."""

    revision: str | None
    trust_remote_code: bool
    dtype: Dtype
    device: str
    backend: BackendChoice
    cache_dir: str | None
    max_model_len: int | None
    long_text: LongText | None
    pooling: Pooling | None
    normalize: bool | None
    default_prompt_name: str | None
    default_prompt: str | None
    max_batch_tokens: int | Literal["auto"]
    replicas: int | None


def configure_process(service: Service, niceness: int = NICENESS) -> None:
    """Configure a process that exists to run ``service``. Call before ``service.run``, and before torch is imported.

    Sets the interpreter's thread switch interval and, if models compute in this process, how OpenMP's threads wait.
    Limits the memory that malloc and oneDNN keep. Lowers the scheduling priority of the service's threads and worker
    processes by ``niceness``. Makes garbage collection rare, and exempts the objects that exist once the models are
    loaded.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # render threads are parallel: 4 µs less for each text
    if service.socket_folder is None:
        limit_openmp_spinning()
    prepare_for_loading()
    service.offload.niceness = relative_niceness(niceness)
    for processes in service.processes.values():
        processes.niceness = service.offload.niceness
    on_loaded = service.on_loaded

    def freeze_loaded_objects() -> None:
        freeze_objects()
        on_loaded()

    service.on_loaded = freeze_loaded_objects


async def place_engines(config: Config) -> tuple[Config, list[Gpu]]:
    """Return the settings with ``--engine`` and ``--replicas`` set, and the GPUs to use. Cancellation: at once."""
    config = await with_engine_placement(config)
    if config.processes.computes_here:
        return config, []
    forbid_torch()
    if config.processes.engine in ("hosts", "ray"):
        return config, []
    gpus = await find_gpus(config.loading)
    return with_replicas(config, len(gpus)), gpus


async def with_engine_placement(config: Config, cores: int | None = None) -> Config:
    """Return the settings with ``--engine`` set. Its default depends on the models and on the number of ``cores``.

    Models whose files take longer than ``PEEK_S`` to read count as models for text. Cancellation: at once.
    """
    if config.processes.engine is not None:
        return config
    folders: list[AnyModelFolder | None] = [None]
    with trio.move_on_after(PEEK_S):
        folders = await Offload().run(
            "load", lambda: [peek_folder(each.location, each.loading) for each in config.sources]
        )
    engine = default_placement(
        config,
        reads_images=any(folder is not None and folder.reads_images for folder in folders),
        by_numpy=all(folder is not None and folder.spec.by_numpy for folder in folders),
        cores=cores,
    )
    return evolve(config, processes=evolve(config.processes, engine=engine))


def in_process_config(
    model: str, *, max_batch_tokens: int | Literal["auto"] = "auto", replicas: int | None = None, **loading: Any
) -> Config:
    """Return the settings of a service with one model for the code of its own process, with ``ModelSettings``.

    Raises ``TypeError`` for an unknown setting and ``ValueError`` for a wrong value.
    """
    try:
        return Config(
            models=(model,),
            loading=(loaded := ModelConfig(**loading)),
            scheduling=SchedulingConfig(max_batch_tokens=max_batch_tokens),
            # On CPU in this process: there are no other requests whose event loop computing could slow down.
            processes=ProcessesConfig(engine=None if has_gpu(loaded) else "local", replicas=replicas),
            logging=LoggingConfig(log_level="warning"),
            batch=BatchConfig(data_dir=""),  # a server's data folder is not for this process
        )
    except ValueError as error:
        raise ValueError(plain_message(error)) from None


@asynccontextmanager
async def open_service(config: Config, niceness: int | None = NICENESS) -> AsyncIterator[Service]:
    """Load models, and run their engines for as long as the block lasts.

    The process is configured, with threads of that ``niceness``; with ``None`` it is left as it is, for programs that
    do other things too. Raises ``ModelLoadError``, ``EngineDeadError`` if an engine ends, and errors of the block as
    they are, not in a group. Cancellation: at once.
    """
    config, gpus = await place_engines(config)
    service = Service(config, gpus=gpus)
    if niceness is not None:
        configure_process(service, niceness)
    error_of_block: BaseException | None = None
    with unwrap_exception_groups(PoolServeError):
        async with trio.open_nursery() as nursery:
            await nursery.start(service.run)
            try:
                await service.wait_ready()
            except EngineDeadError:
                await trio.sleep_forever()  # ``Service.run`` raises the reason
            try:
                yield service
            except BaseException as error:
                error_of_block = error  # raised after the nursery, which would put it into a group
            nursery.cancel_scope.cancel(reason="the block has ended")
    if error_of_block is not None:
        raise error_of_block
