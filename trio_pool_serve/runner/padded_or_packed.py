"""The choice of how a backbone is computed: directly, packed, from CUDA graphs, and compiled later."""

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from attrs import frozen
from torch import Tensor

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import require
from trio_pool_serve.runner.comparison import difference, probe_rows, states_of, tolerance_of
from trio_pool_serve.runner.cuda.fused_blocks import fuse, twin_of
from trio_pool_serve.runner.cuda.graphs import (
    CudaGraphBackend,
    GraphedBackbone,
    shapes_to_capture,
    synchronisations_refused,
)
from trio_pool_serve.runner.cuda.packed_backbone import PackedBackbone, pack_with_fastest_attention
from trio_pool_serve.runner.cuda.packed_inputs import PackedShape
from trio_pool_serve.runner.cuda.varlen import CannotPackError, has_flash
from trio_pool_serve.runner.forward_pass import Compute
from trio_pool_serve.runner.loaded_model import Backbone, LoadedModel, LoadingParams
from trio_pool_serve.runner.transformer_masks import skip_mask_checks
from trio_pool_serve.telemetry.start_display import report_items
from trio_pool_serve.types import RenderedPrompt, Steps

logger = logging.getLogger(__name__)

Capture: TypeAlias = Callable[[int], str]
"""Captures CUDA graphs for batches of up to this many tokens, and returns words for the log."""


@frozen(eq=False)
class Computation:
    """A way to compute batches: its function, whether padding is computed (CUDA graphs aside), words for the log.

    ``fuse`` compiles what ``compute`` computes; ``None`` if that is not possible.
    """

    compute: Compute
    pads: bool = True
    about: tuple[str, ...] = ()
    capture: Capture | None = None
    fuse: Callable[[], Steps] | None = None


def refuse_impossible(config: ModelConfig, params: LoadingParams) -> None:
    """Raise ``ModelLoadError`` for settings with which a model cannot be computed, before anything takes long."""
    on_cpu = params.device.type == "cpu"
    require(
        config.dtype != "int8" or (on_cpu and config.backend not in ("torch", "compile")),
        "--dtype int8 requires OpenVINO on CPU, and excludes --backend torch and compile.",
    )
    require(
        config.backend != "openvino" or on_cpu,
        f"--backend openvino computes only on CPU, not on {params.device}; set --device cpu.",
    )


def choose_computation(loaded: LoadedModel, config: ModelConfig, params: LoadingParams, why_torch: str) -> Computation:
    """Return the fastest computation by torch that the settings allow and whose output agrees with the backbone's.

    ``why_torch`` is the reason why OpenVINO does not compute it.
    """
    if params.device.type != "cpu":
        skip_mask_checks(loaded.backbone.model)
    elif config.backend != "compile":
        return Computation(loaded.backbone, about=(f"by torch ({why_torch})",))
    try:
        twin = _copied(loaded.backbone, config, params)
        packed, kernel = pack_with_fastest_attention(loaded.backbone, params)
    except CannotPackError as reason:
        return Computation(loaded.backbone, about=(f"padded ({reason})",))
    # A vocabulary's logits take memory, and take long to compute. A CPU has no graphs.
    has_graphs = not loaded.output_width and params.device.type != "cpu"
    graphs = GraphedBackbone(packed, CudaGraphBackend(params.device), params.device) if has_graphs else None
    return Computation(
        graphs or packed,
        pads=False,
        about=("without padding", *([f"attention by {kernel}"] if kernel else ())),
        capture=partial(_capture, graphs, params) if graphs else None,
        fuse=partial(change_over, twin, packed, graphs, params) if twin else None,
    )


def change_over(twin: Backbone, packed: PackedBackbone, graphs: GraphedBackbone | None, params: LoadingParams) -> Steps:
    """Compile, and return the steps after which plain rows are computed so. Blocks, and raises errors, as ``fuse``.

    A step raises ``CannotPackError`` if a new graph's output differs. After any error nothing is fused, and no graphs
    are left.
    """
    fused = fuse(twin, params)

    def begin() -> None:
        packed.fused = fused

    def renew(graphs: GraphedBackbone, shape: PackedShape) -> None:
        try:
            graphs.renew(shape, lambda renewed: _agrees(renewed, fused, params))
        except Exception:
            packed.fused = None
            graphs.clear()
            raise

    return [begin, *([partial(renew, graphs, shape) for shape in reversed(graphs.shapes)] if graphs else [])]


def _copied(backbone: Backbone, config: ModelConfig, params: LoadingParams) -> Backbone | None:
    """Return a twin to compile, made before anything hooks into the model; ``None`` if its code cannot be copied.

    Raises ``CannotPackError`` if the model is not to be packed.
    """
    require(config.backend != "torch", "as configured", CannotPackError)
    on_cpu = params.device.type == "cpu"
    require(on_cpu or params.dtype != torch.float32, "packed attention does not support float32", CannotPackError)
    require(on_cpu or has_flash(), "this version of torch has no variable-length attention", CannotPackError)
    require(type(backbone) is Backbone, "it reads images", CannotPackError)
    try:
        return twin_of(backbone)
    except Exception as error:
        logger.warning("%s is not compiled, as its code cannot be copied: %r", type(backbone.model).__name__, error)
        return None


def _capture(graphs: GraphedBackbone, params: LoadingParams, max_batch_tokens: int) -> str:
    """Capture graphs, and return words for the log; none are left if capturing fails or their output differs."""
    backbone = graphs.packed.backbone
    shapes = shapes_to_capture(
        parameters=backbone.parameters - backbone.embedding_parameters,
        max_tokens=params.max_tokens,
        max_batch_tokens=max_batch_tokens,
    )
    graphs.clear()
    try:
        # A failed capture keeps its memory (pytorch issue 190348), so code that waits for the device is not captured.
        with synchronisations_refused(params.device):
            _states(graphs.packed, backbone, params)
        graphs.capture(report_items(shapes, "capturing CUDA graphs"))
        agrees = _agrees(graphs, graphs.packed, params)
    except Exception as error:
        return f"no CUDA graphs ({repr(error).splitlines()[0]})"
    if not agrees:
        graphs.clear()
        return "no CUDA graphs (they differ)"
    return f"{len(graphs.shapes)} CUDA graphs"


def _agrees(graphs: GraphedBackbone, packed: PackedBackbone, params: LoadingParams) -> bool:
    expected = _states(packed, packed.backbone, params)
    return difference(_states(graphs, packed.backbone, params), expected) <= tolerance_of(packed.backbone)


def _states(compute: Compute, backbone: Backbone, params: LoadingParams) -> list[Tensor]:
    rows = probe_rows(backbone.vocab_size, (min(9, params.max_tokens), 5))  # they fit into every graph
    prompts = [*map(RenderedPrompt, rows)]
    return states_of(compute, prompts, pad_token_id=params.pad_token_id, device=params.device)
