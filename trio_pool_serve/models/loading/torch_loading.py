"""Loading a model's folder into a runner that computes with torch."""

import logging
from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name

import torch
from attrs import evolve
from torch import nn

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.config.computing_config import CPU_BATCH_TOKENS, GPU_BATCH_TOKENS
from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.models.files.adapter_files import read_adapter
from trio_pool_serve.models.files.model_digest import fingerprint_of_loaded
from trio_pool_serve.models.loading.compiled_code import fuse_from_cache
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.processes.allocator import MMAP_THRESHOLD_BYTES, retain_freed_memory
from trio_pool_serve.runner.applied_adapters import Adapters
from trio_pool_serve.runner.cuda.fp8_blocks import quantize_blocks
from trio_pool_serve.runner.device_memory import is_out_of_memory
from trio_pool_serve.runner.loaded_model import LoadedModel, LoadingParams
from trio_pool_serve.runner.output_copy import OutputCopier
from trio_pool_serve.runner.padded_or_packed import choose_computation, refuse_impossible
from trio_pool_serve.runner.torch_device import resolve_device, resolve_dtype, use_device
from trio_pool_serve.runner.transformer_runner import TransformerRunner
from trio_pool_serve.telemetry.start_display import report_step
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import ComputedBy, RunnerFacts

logger = logging.getLogger(__name__)

OUTPUT_BYTES = 2**30
"""Maximum memory of the backbone's output for one batch of the default size."""


STATES_AT_ONCE = 8
"""A forward pass uses up to this many times the memory of its widest states. MiniLM: 96 MiB for the largest batch,
2,048 tokens, which leaves 52 MiB at the end of the heap."""


def load_unfitted(
    folder: AnyModelFolder, config: ModelConfig, offload: Offload, why_torch: str = "as configured"
) -> Callable[[], TransformerRunner]:
    """Load a model and compute a warm-up batch with torch; the returned function chooses how batches are computed.

    ``why_torch`` is the reason why OpenVINO does not compute the model. Blocks for seconds. Raises ``ModelLoadError``.
    """
    runner = load_warm_runner(folder, config, offload)
    if runner.facts.on_cpu:
        retain_freed_memory(_freed_by_batch(runner))
    runner = evolve(runner, adapters=Adapters.of(runner.loaded, read_adapter))
    refuse_impossible(config, runner.params)
    return partial(_choose, runner, folder, config, torch.get_num_threads(), why_torch)


def load_warm_runner(folder: AnyModelFolder, config: ModelConfig, offload: Offload) -> TransformerRunner:
    """Load a model; return its runner, which has computed a batch. Blocks for seconds. Raises ``ModelLoadError``.

    If ``--dtype auto`` chooses a dtype in which only this model cannot be computed, its runner computes in float32.
    """
    device = resolve_device(config.device)
    use_device(device)
    # cuDNN's attention makes a plan for each shape: 0.44 s each (pytorch 2.11 on Hopper, FunASR issue 3704).
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    params = LoadingParams(
        device=device,
        dtype=resolve_dtype(config.dtype, device),
        trust_remote_code=config.trust_remote_code,
        pad_token_id=folder.pad_token_id,
        max_tokens=folder.max_model_len,
    )
    require(
        config.dtype != "fp8" or not folder.reads_images,
        "--dtype fp8 does not apply to models that read images; use bfloat16.",
    )
    try:
        return _warm_runner(folder, params, config, offload)
    except FirstBatchError as error:
        is_of_device = is_out_of_memory(error) or isinstance(error.__cause__, torch.AcceleratorError)
        if is_of_device or params.dtype == torch.float32:
            raise
        reason = str(error.__cause__)
    # Outside of the handler, whose error refers to the first runner and its weights.
    dtype = str(params.dtype).removeprefix("torch.")
    require(
        config.dtype not in (dtype, "fp8"),
        f"--dtype {config.dtype}: torch cannot compute {folder.model_type} in it ({reason}). "
        "Use --dtype auto or float32.",
    )
    logger.warning("%s is computed in float32, as torch cannot compute it in %s: %s", folder.path.name, dtype, reason)
    params = evolve(params, dtype=torch.float32)
    return _warm_runner(folder, params, config, offload, f"torch cannot compute it in {dtype}")


class FirstBatchError(ModelLoadError):
    """The model was loaded, but cannot compute a batch."""


def _warm_runner(
    folder: AnyModelFolder, params: LoadingParams, config: ModelConfig, offload: Offload, why_float32: str = ""
) -> TransformerRunner:
    report_step("loading the weights")
    loaded = resolve_name(folder.kind.load)(folder, params)
    facts = RunnerFacts(
        max_batch_tokens=_default_batch_tokens(loaded, params),
        takes_adapters=True,
        computed_by=ComputedBy(dtype=str(params.dtype).removeprefix("torch."), backend="torch"),
        requested_dtype=config.dtype,
        why_float32=why_float32,
        device=str(params.device),
        model_type=folder.model_type,
        parameters=loaded.backbone.parameters,
        weight_bytes=loaded.backbone.weight_bytes,
        heads=loaded.description,
        max_tokens=folder.max_model_len,
    )
    copier = None if facts.on_cpu else OutputCopier(params.device, offload)
    runner = _first_batch(TransformerRunner(loaded, params, facts, copier).warmed_up)
    return _first_batch(partial(_in_fp8, runner)) if config.dtype == "fp8" else runner


def _in_fp8(runner: TransformerRunner) -> TransformerRunner:
    """Quantise the model. Raises ``ModelLoadError``, and errors of torch if the device does not compute it."""
    report_step("quantising to FP8")
    about = f"blocks in fp8 (cosine {quantize_blocks(runner.loaded.backbone, runner.params):.4f} with bfloat16)"
    facts = evolve(
        runner.facts,
        computed_by=runner.facts.computed_by._replace(dtype="fp8"),
        weight_bytes=runner.loaded.backbone.weight_bytes,
        computation=(about,),
    )
    return evolve(runner, facts=facts)


def _first_batch(compute: Callable[[], TransformerRunner]) -> TransformerRunner:
    try:
        return compute()
    except Exception as error:
        raise FirstBatchError(f"The model was loaded, but cannot compute its first batch: {error}") from error


def _choose(
    runner: TransformerRunner, folder: AnyModelFolder, config: ModelConfig, threads: int, why_torch: str
) -> TransformerRunner:
    """Choose the fastest way to compute that agrees with eager torch, and try the heads on it."""
    params = runner.params
    use_device(params.device)
    torch.set_num_threads(threads)  # a batch may have changed it in this thread
    computation = choose_computation(runner.loaded, config, params, why_torch)
    fuse = None if computation.fuse is None else partial(fuse_from_cache, folder, config, params, computation.fuse)
    computation = evolve(computation, about=(*runner.facts.computation, *computation.about), fuse=fuse)
    dtype = f"torch.{runner.facts.computed_by.dtype}"
    fingerprint = fingerprint_of_loaded(folder.path, config, (), dtype, as_read=folder.file_states)
    return _first_batch(partial(runner.computing, computation, fingerprint))


def _freed_by_batch(runner: TransformerRunner) -> int:
    """Return how much memory the largest batch frees to the heap: its widest states, several times."""
    modules = runner.loaded.backbone.model.modules()
    widths = (module.out_features for module in modules if isinstance(module, nn.Linear))
    states = runner.facts.max_batch_tokens * max(widths, default=0) * runner.params.dtype.itemsize
    return STATES_AT_ONCE * min(states, MMAP_THRESHOLD_BYTES)  # larger ones are not in the heap


def _default_batch_tokens(loaded: LoadedModel, params: LoadingParams) -> int:
    """Return the default for a device; fewer if a token has a large output."""
    tokens = CPU_BATCH_TOKENS if params.device.type == "cpu" else GPU_BATCH_TOKENS
    output_bytes = loaded.output_width * params.dtype.itemsize
    return min(tokens, max(256, OUTPUT_BYTES // output_bytes)) if output_bytes else tokens
