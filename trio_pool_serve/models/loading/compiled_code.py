"""Compiling a model's blocks in another process, once for its architecture and device: the cache keeps the code."""

import logging
import os
import resource
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from attrs import define

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import require
from trio_pool_serve.models.files.model_digest import SMALL_FILES, model_entry
from trio_pool_serve.models.loading.converter import ChildConverter, ConversionJob
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.runner.cpu_features import cpu_name
from trio_pool_serve.runner.cuda.fused_blocks import compiler_files_in, fuse, twin_of
from trio_pool_serve.runner.loaded_model import LoadingParams
from trio_pool_serve.runner.torch_device import use_device
from trio_pool_serve.runner.transformer_runner import TransformerRunner
from trio_pool_serve.storage.model_cache import ModelCache, RecordBase, installed_versions, written
from trio_pool_serve.types import Steps

logger = logging.getLogger(__name__)

LIBRARIES = ("torch", "triton", "transformers", "trio-pool-serve")
"""The code depends on their versions."""


def fuse_from_cache(
    folder: AnyModelFolder, config: ModelConfig, params: LoadingParams, fuse_here: Callable[[], Steps]
) -> Steps:
    """Return the steps of ``fuse_here``, after another process has compiled the model if the cache has no code for it.

    Blocks for seconds, and if nothing is cached for some 20 more. Raises ``ModelLoadError`` if that process fails or
    the environment switches the compiler off, ``OSError``, ``StorageError``, and the errors of ``fuse_here``.
    """
    require(os.environ.get("TORCHDYNAMO_DISABLE") != "1", "TORCHDYNAMO_DISABLE is set")
    device = params.device
    use_device(device)
    name = cpu_name() if device.type == "cpu" else torch.get_device_module(device).get_device_name()
    record = RecordBase(what=f"compiled for {name}", versions=installed_versions(*LIBRARIES))

    def compile_into(files: Path) -> RecordBase:
        with closing(ChildConverter.loaded(ConversionJob.of(folder, config, compiles=True))) as child:
            logger.info("%s is being compiled by another process; until then it runs uncompiled", folder.path.name)
            child.compile(files)
        return record

    cache, entry = ModelCache.of(config.cache_dir), None
    if cache is not None:  # the code does not depend on the weights
        kind = ("compiled blocks", folder.kind.load, config.dtype, str(params.dtype), name, *record.versions.values())
        entry = model_entry(folder.path, cache, *kind, suffixes=SMALL_FILES, part="-compiled")
    with ExitStack() as stack:
        with nullcontext() if entry is None else entry.locked():
            is_cached = entry is not None and entry.read(RecordBase) is not None
            path = entry.path if entry and is_cached else stack.enter_context(written(compile_into, entry))[0]
            temporary = TemporaryDirectory(prefix="trio_pool_serve.", ignore_cleanup_errors=True)
            files = Path(stack.enter_context(temporary)) / "compiled"
            shutil.copytree(path, files)  # the compiler writes there, too
        with compiler_files_in(files):
            return fuse_here()


@define(eq=False)
class Compilation:
    """One model, loaded in the process that compiles it."""

    runner: TransformerRunner

    def convert(self, folder: Path) -> None:
        """Write the compiler's files to an empty folder. Blocks for seconds. Raises the errors of ``fuse``."""
        began = time.perf_counter()
        params = self.runner.params
        with compiler_files_in(folder):
            fuse(twin_of(self.runner.loaded.backbone), params)
        took = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB"
        if params.device.type != "cpu":
            peak = torch.get_device_module(params.device).max_memory_allocated(params.device)
            took += f" and {peak / 2**20:.0f} MiB of the GPU"
        logger.info("compiled in %.1f s by a process that took %s", time.perf_counter() - began, took)
