"""How a backbone is computed: by itself, or by something faster that gives the same."""

import torch
from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.compiled import CompiledBackbone
from trio_pool_serve.runner.cuda.graphs import CudaGraphBackend, GraphedBackbone, shapes_to_capture
from trio_pool_serve.runner.cuda.packed_backbone import pack_backbone
from trio_pool_serve.runner.cuda.varlen import FLASH, CannotPackError, has_flash
from trio_pool_serve.runner.loaded_model import LoadedModel
from trio_pool_serve.runner.mask_checks import skip_mask_checks
from trio_pool_serve.runner.probe import TOLERANCES, Compute, computed, difference, probe_rows
from trio_pool_serve.runner.progress import shown


@frozen(eq=False)
class Computation:
    """What computes batches; whether it reads padding (of more than a small batch); and what to tell people of it."""

    compute: Compute
    pads: bool = True
    about: tuple[str, ...] = ()


@frozen(kw_only=True, eq=False)
class Place:
    """Where and what is computed: rows of at most ``max_tokens`` tokens, padded with ``pad_token_id``."""

    device: torch.device
    dtype: torch.dtype
    pad_token_id: int
    max_tokens: int


def choose_computation(loaded: LoadedModel, config: ModelConfig, place: Place) -> Computation:
    """Return the fastest way that the settings allow and that gives what the model gives.

    Raises ``ModelLoadError`` if the model is to be compiled and cannot be.
    """
    if config.compile:
        return _compiled(loaded.backbone, place)
    if place.device.type != "cuda" or type(loaded.backbone) is not Backbone:
        return Computation(loaded.backbone)
    skip_mask_checks(loaded.backbone.model)
    computation = _packed(loaded.backbone, config, place)
    if config.cuda_graphs and not loaded.output_width:  # a vocabulary's logits take memory, and long to compute
        computation = _graphed(loaded.backbone, computation, place)
    return computation


def _compiled(backbone: Backbone, place: Place) -> Computation:
    if type(backbone) is not Backbone:
        raise ModelLoadError("--compile: models that read images cannot be compiled.")
    compiled = CompiledBackbone(backbone, place.device)
    try:
        compiled.compile()
    except Exception as error:
        raise ModelLoadError(f"--compile: the model cannot be compiled: {error}") from error
    return Computation(compiled, about=("compiled",))


def _packed(backbone: Backbone, config: ModelConfig, place: Place) -> Computation:
    try:
        if config.attention == "padded":
            raise CannotPackError("as asked")  # noqa: TRY301  (all reasons are told in the same way)
        if place.dtype == torch.float32:
            raise CannotPackError("no kernel computes float32 otherwise")  # noqa: TRY301
        if not has_flash():
            raise CannotPackError("this torch has no attention for rows of any lengths")  # noqa: TRY301
        packed = pack_backbone(
            backbone, FLASH, pad_token_id=place.pad_token_id, max_tokens=place.max_tokens, device=place.device
        )
    except CannotPackError as reason:
        return Computation(backbone, about=(f"padded ({reason})",))
    return Computation(packed, pads=False, about=("without padding",))


def _graphed(backbone: Backbone, otherwise: Computation, place: Place) -> Computation:
    """Capture graphs; a model that cannot be captured, or not so that it agrees, does without."""
    shapes = shapes_to_capture(parameters=backbone.parameters, max_tokens=place.max_tokens)
    graphs = GraphedBackbone(backbone, otherwise.compute, CudaGraphBackend(place.device), place.pad_token_id)
    try:
        graphs.capture(shown(shapes, "Capturing CUDA graphs"), place.device)
        rows = probe_rows(backbone.vocab_size, (min(12, place.max_tokens), 5, 1))
        ours, expected = (
            computed(compute, rows, pad_token_id=place.pad_token_id, device=place.device)
            for compute in (graphs, backbone)
        )
    except Exception as error:
        reason = f"no CUDA graphs ({repr(error).splitlines()[0]})"
        return Computation(otherwise.compute, otherwise.pads, (*otherwise.about, reason))
    if not difference(ours, expected) <= TOLERANCES[place.dtype]:
        return Computation(otherwise.compute, otherwise.pads, (*otherwise.about, "no CUDA graphs (they differ)"))
    return Computation(graphs, otherwise.pads, (*otherwise.about, f"{len(graphs.shapes)} CUDA graphs"))
