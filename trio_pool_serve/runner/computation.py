"""The choice of how a backbone is computed: directly, compiled, packed, or from CUDA graphs."""

from collections.abc import Callable
from functools import partial

import torch
from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.compiled import CompiledBackbone
from trio_pool_serve.runner.compute_params import ComputeParams
from trio_pool_serve.runner.cuda.graphs import (
    CudaGraphBackend,
    GraphedBackbone,
    shapes_to_capture,
    synchronisations_refused,
)
from trio_pool_serve.runner.cuda.packed_backbone import PackedBackbone, pack_backbone
from trio_pool_serve.runner.cuda.varlen import FLASH, CannotPackError, has_flash
from trio_pool_serve.runner.forward_pass import Compute, Padded
from trio_pool_serve.runner.loaded_model import LoadedModel
from trio_pool_serve.runner.probe import TOLERANCES, compute_rows, difference, probe_rows
from trio_pool_serve.runner.progress import with_progress_bar
from trio_pool_serve.runner.transformer_masks import skip_mask_checks


@frozen(eq=False)
class Computation:
    """The function that computes batches, whether it computes padding (CUDA graphs aside), and words for the log."""

    compute: Compute
    pads: bool = True
    about: tuple[str, ...] = ()
    capture: Callable[[int], str] | None = None
    """Captures CUDA graphs for batches of at most so many tokens, and returns words for the log."""


def refuse_impossible(backbone: Backbone, config: ModelConfig, params: ComputeParams) -> None:
    """Raise ``ModelLoadError`` for settings that a model cannot be computed with, before anything takes long."""
    on_cpu = params.device.type == "cpu"
    if config.dtype == "int8" and (config.backend in ("torch", "compile") or not on_cpu):
        raise ModelLoadError(
            "--dtype int8: models are quantised for OpenVINO, on CPU only and without --backend torch or compile."
        )
    if config.backend == "openvino" and not on_cpu:
        raise ModelLoadError(f"--backend openvino computes on CPU, not on {params.device}: set --device cpu.")
    if config.backend == "compile" and type(backbone) is not Backbone:
        raise ModelLoadError("--backend compile: models that read images cannot be compiled.")


def choose_computation(loaded: LoadedModel, config: ModelConfig, params: ComputeParams, why_torch: str) -> Computation:
    """Return the fastest computation by torch that the settings allow and whose output agrees with the backbone's.

    ``why_torch`` says why OpenVINO does not compute it. Raises ``ModelLoadError`` if what is demanded fails.
    """
    if params.device.type != "cpu":
        skip_mask_checks(loaded.backbone.model)
    if config.backend == "compile":
        return _compiled(loaded.backbone, params)
    if params.device.type == "cpu":
        return Computation(Padded(loaded.backbone), about=(f"by torch ({why_torch})",))
    return _on_gpu(loaded, config, params)


def _compiled(backbone: Backbone, params: ComputeParams) -> Computation:
    compiled = CompiledBackbone(backbone, params.device)
    try:
        compiled.compile()
    except Exception as error:
        raise ModelLoadError(f"--backend compile: the model cannot be compiled: {error}") from error
    return Computation(Padded(compiled), about=("compiled",))


def _on_gpu(loaded: LoadedModel, config: ModelConfig, params: ComputeParams) -> Computation:
    try:
        packed = _pack(loaded.backbone, config, params)
    except CannotPackError as reason:
        return Computation(Padded(loaded.backbone), about=(f"padded ({reason})",))
    if not loaded.output_width:  # a vocabulary's logits take memory, and take long to compute
        graphs = GraphedBackbone(packed, CudaGraphBackend(params.device), params.device)
        return Computation(graphs, pads=False, about=("without padding",), capture=partial(_capture, graphs, params))
    return Computation(packed, pads=False, about=("without padding",))


def _pack(backbone: Backbone, config: ModelConfig, params: ComputeParams) -> PackedBackbone:
    """Return the packed backbone; raises ``CannotPackError``."""
    if config.backend == "torch":
        raise CannotPackError("as configured")
    if params.dtype == torch.float32:
        raise CannotPackError("there is no packed attention for float32")
    if not has_flash():
        raise CannotPackError("this version of torch has no variable-length attention")
    return pack_backbone(
        backbone, FLASH, pad_token_id=params.pad_token_id, max_tokens=params.max_tokens, device=params.device
    )


def _capture(graphs: GraphedBackbone, params: ComputeParams, max_batch_tokens: int) -> str:
    """Capture graphs, and return words for the log; none are left if capturing fails or their output differs."""
    backbone = graphs.packed.backbone
    shapes = shapes_to_capture(
        parameters=backbone.parameters - backbone.embedding_parameters,
        max_tokens=params.max_tokens,
        max_batch_tokens=max_batch_tokens,
    )
    graphs.clear()
    rows = probe_rows(backbone.vocab_size, (min(12, params.max_tokens), 5, 1))
    outputs_of = partial(compute_rows, rows=rows, pad_token_id=params.pad_token_id, device=params.device)
    try:
        # A capture that fails keeps its memory (pytorch issue 190348), so what waits for the device is not captured.
        with synchronisations_refused(params.device):
            expected = outputs_of(graphs.packed)
        graphs.capture(with_progress_bar(shapes, "Capturing CUDA graphs"))
        ours = outputs_of(graphs)
    except Exception as error:
        return f"no CUDA graphs ({repr(error).splitlines()[0]})"
    if not difference(ours, expected) <= TOLERANCES[params.dtype]:
        graphs.clear()
        return "no CUDA graphs (they differ)"
    return f"{len(graphs.shapes)} CUDA graphs"
