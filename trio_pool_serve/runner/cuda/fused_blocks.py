"""A packed backbone whose blocks torch compiles: element-wise work between matrix products becomes few kernels.

Blocks of a transformer have the same code, so one of them is compiled for all: BERT-base takes 8 s instead of 25 (CPU,
two cores). Numbers of tokens and rows are symbolic. What torch's compiler writes for one process, another one reads.
"""

import atexit
import copy
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import config as dynamo_config
from torch._inductor import config as inductor_config
from transformers.modeling_layers import GradientCheckpointingLayer

from trio_pool_serve.runner.cuda.packed_backbone import PackedBackbone, pack_backbone
from trio_pool_serve.runner.loaded_model import Backbone, LoadingParams

MAX_VARIANTS = 128
"""Of the compiled blocks of all models in a process: transformers wraps the code of all its blocks in one function."""

OPTIONS = {"compile_threads": 1, "cpp.dynamic_threads": True, "cpp_cache_precompile_headers": False}
"""No processes beside this one, code for any number of threads, and no files outside of the folder for them."""

_compiling = threading.Lock()
"""Held while torch compiles in this process, for one model at a time."""

# Python's end would end the thread of the compiler, whose C++ code then aborts the process.
atexit.register(_compiling.acquire, timeout=10)


def twin_of(backbone: Backbone) -> Backbone:
    """Return a model with the same weights and buffers, in modules of its own: another thread may compute with it."""
    model = backbone.model
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return Backbone(copy.deepcopy(model, shared), backbone.output)


def fuse(twin: Backbone, params: LoadingParams) -> PackedBackbone:
    """Compile the blocks of ``twin``, and return its packed backbone, whose output agrees with what it computed before.

    Afterwards nothing is compiled in the process: what fits no compiled code is computed without. Blocks for seconds,
    or longer if the compiler's cache is empty. Raises ``CannotPackError``, and the compiler's errors.
    """
    oracle = twin_of(twin)  # not the model that serves, whose hooks are for the batches of another thread
    transformer: Any = twin.model.base_model
    blocks = [module for module in transformer.modules() if isinstance(module, GradientCheckpointingLayer)]
    for block in blocks or [transformer]:
        block.forward = torch.compile(block.forward, dynamic=True, fullgraph=True, options={"guard_filter_fn": _guards})
    with (
        dynamo_config.patch(recompile_limit=MAX_VARIANTS),
        inductor_config.patch(OPTIONS),
        torch.compiler.set_stance("default"),
    ):
        packed = pack_backbone(twin, params, oracle)
    torch.compiler.set_stance("eager_on_recompile")
    return packed


def _guards(guards: Sequence[Any]) -> list[bool]:
    """Return which conditions of compiled code are checked: not torch's number of threads, which batches change."""
    return [guard.guard_type != "GLOBAL_STATE" for guard in guards]


@contextmanager
def compiler_files_in(folder: Path) -> Iterator[None]:
    """Within the block, torch's compiler keeps its files in a folder, in all threads: one block runs at a time."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    with _compiling:
        before = {name: os.environ[name] for name in names if name in os.environ}
        os.environ |= {name: str(folder / name.partition("_")[0].lower()) for name in names}
        try:
            yield
        finally:
            for name in names:
                os.environ.pop(name, None)
            os.environ |= before
