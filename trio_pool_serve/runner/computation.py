"""The choice of how a backbone is computed: directly, compiled, packed, or from CUDA graphs."""

import torch
from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.compiled import CompiledBackbone
from trio_pool_serve.runner.compute_params import ComputeParams
from trio_pool_serve.runner.cuda.graphs import CudaGraphBackend, GraphedBackbone, shapes_to_capture
from trio_pool_serve.runner.cuda.packed_backbone import pack_backbone
from trio_pool_serve.runner.cuda.varlen import FLASH, CannotPackError, has_flash
from trio_pool_serve.runner.loaded_model import LoadedModel
from trio_pool_serve.runner.openvino.selection import CannotUseOpenVinoError, choose_openvino
from trio_pool_serve.runner.probe import TOLERANCES, Compute, compute_rows, difference, probe_rows
from trio_pool_serve.runner.progress import with_progress_bar
from trio_pool_serve.runner.transformer_masks import skip_mask_checks


@frozen(eq=False)
class Computation:
    """The function that computes batches, whether it computes padding (CUDA graphs aside), and words for the log."""

    compute: Compute
    pads: bool = True
    about: tuple[str, ...] = ()
    concurrent_launches: int = 1
    """Number of batches that may be computed at a time, each in a thread of its own."""
    has_own_threads: bool = False
    """Whether ``compute`` computes in threads of its own, without the interpreter lock."""
    mean_cosine: float | None = None
    """Agreement of a quantised model with float32, on texts."""


def choose_computation(loaded: LoadedModel, config: ModelConfig, params: ComputeParams) -> Computation:
    """Return the fastest computation that the settings allow and whose output agrees with the backbone's.

    Raises ``ModelLoadError`` if the settings demand compilation and it fails.
    """
    if config.dtype == "int8" and (config.compile or params.device.type != "cpu"):
        raise ModelLoadError("--dtype int8: models are quantised for OpenVINO, on CPU only and without --compile.")
    if config.compile:
        return _compiled(loaded.backbone, params)
    if params.device.type == "cpu":
        return _on_cpu(loaded, config, params)
    if type(loaded.backbone) is not Backbone:
        return Computation(loaded.backbone)
    skip_mask_checks(loaded.backbone.model)
    computation = _packed(loaded.backbone, config, params)
    if config.cuda_graphs and not loaded.output_width:  # a vocabulary's logits take memory, and take long to compute
        computation = _graphed(loaded.backbone, computation, params)
    return computation


def _compiled(backbone: Backbone, params: ComputeParams) -> Computation:
    if type(backbone) is not Backbone:
        raise ModelLoadError("--compile: models that read images cannot be compiled.")
    compiled = CompiledBackbone(backbone, params.device)
    try:
        compiled.compile()
    except Exception as error:
        raise ModelLoadError(f"--compile: the model cannot be compiled: {error}") from error
    return Computation(compiled, about=("compiled",))


def _on_cpu(loaded: LoadedModel, config: ModelConfig, params: ComputeParams) -> Computation:
    """Choose OpenVINO where it can be used; torch holds the interpreter lock between its kernels."""
    try:
        chosen = choose_openvino(loaded, config, params)
    except CannotUseOpenVinoError as reason:
        if config.dtype == "int8":
            raise ModelLoadError(f"--dtype int8: {reason}.") from reason
        if config.cpu_backend == "openvino":
            raise ModelLoadError(f"--cpu-backend openvino: {reason}.") from reason
        return Computation(loaded.backbone, about=(f"by torch ({reason})",))
    return Computation(
        chosen.compute,
        about=(chosen.about,),
        concurrent_launches=params.concurrent_launches,
        has_own_threads=True,
        mean_cosine=chosen.mean_cosine,
    )


def _packed(backbone: Backbone, config: ModelConfig, params: ComputeParams) -> Computation:
    try:
        if config.attention == "padded":
            raise CannotPackError("as configured")  # noqa: TRY301  (all reasons are logged in the same way)
        if params.dtype == torch.float32:
            raise CannotPackError("there is no packed attention for float32")  # noqa: TRY301
        if not has_flash():
            raise CannotPackError("this version of torch has no variable-length attention")  # noqa: TRY301
        packed = pack_backbone(
            backbone, FLASH, pad_token_id=params.pad_token_id, max_tokens=params.max_tokens, device=params.device
        )
    except CannotPackError as reason:
        return Computation(backbone, about=(f"padded ({reason})",))
    return Computation(packed, pads=False, about=("without padding",))


def _graphed(backbone: Backbone, fallback: Computation, params: ComputeParams) -> Computation:
    """Capture graphs; without any if capturing fails or the graphs' output differs."""
    shapes = shapes_to_capture(parameters=backbone.parameters, max_tokens=params.max_tokens)
    graphs = GraphedBackbone(backbone, fallback.compute, CudaGraphBackend(params.device), params.pad_token_id)
    try:
        graphs.capture(with_progress_bar(shapes, "Capturing CUDA graphs"), params.device)
        rows = probe_rows(backbone.vocab_size, (min(12, params.max_tokens), 5, 1))
        ours, expected = (
            compute_rows(compute, rows, pad_token_id=params.pad_token_id, device=params.device)
            for compute in (graphs, backbone)
        )
    except Exception as error:
        reason = f"no CUDA graphs ({repr(error).splitlines()[0]})"
        return Computation(fallback.compute, fallback.pads, (*fallback.about, reason))
    if not difference(ours, expected) <= TOLERANCES[params.dtype]:
        return Computation(fallback.compute, fallback.pads, (*fallback.about, "no CUDA graphs (they differ)"))
    return Computation(graphs, fallback.pads, (*fallback.about, f"{len(graphs.shapes)} CUDA graphs"))
