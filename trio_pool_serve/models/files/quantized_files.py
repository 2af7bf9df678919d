"""Quantised checkpoints whose weights are dequantised when they are loaded: FP8 and compressed-tensors of 8 bits."""

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from trio_pool_serve.errors import require

FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
STRATEGIES = ("tensor", "channel", "block")

INSTEAD = "Serve the original, unquantised checkpoint; on CPU, --dtype int8 quantises it, on GPUs --dtype fp8."


@frozen
class Quantization:
    """The format in which a checkpoint's weights are stored."""

    name: str
    """The format's name, for messages."""
    is_float: bool = True
    """Whether in 8 bits of floating point; else in int8."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale, if blocks do."""


def read_quantization(place: str, config: Mapping[str, Any]) -> Quantization | None:
    """Return how a checkpoint's weights are quantised by ``quantization_config``; ``None`` if they are not.

    Raises ``ModelLoadError`` unless they can be dequantised.
    """
    declared = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not declared:
        return None
    method = (
        "bitsandbytes" if declared.get("load_in_4bit") or declared.get("load_in_8bit") else declared.get("quant_method")
    )
    if method == "fp8":
        return Quantization("FP8", block=_block(place, declared.get("weight_block_size")))
    _require(method == "compressed-tensors", place, "quant_method", method, "fp8, compressed-tensors")
    groups = [group.get("weights") or {} for group in (declared.get("config_groups") or {}).values()]
    for weights in groups:
        kind = weights.get("num_bits"), weights.get("symmetric", True), weights.get("strategy") in STRATEGIES
        _require(
            kind == (8, True, True), place, "config_groups", weights, f"8 bits, symmetric, by {', '.join(STRATEGIES)}"
        )
    form = declared.get("format")
    _require(form in FORMATS, place, "format", form, ", ".join(FORMATS))
    for key in ("sparsity_config", "transform_config"):
        section = declared.get(key) or {}
        is_dense = section.get("format", "dense") == "dense" and not section.get("config_groups")
        _require(is_dense, place, key, section, "none")
    blocks = {_block(place, weights.get("block_structure")) for weights in groups}
    return Quantization(
        f"compressed-tensors ({form})",
        is_float=any(weights.get("type") == "float" for weights in groups),
        block=next(iter(blocks)) if len(blocks) == 1 else None,
    )


def _block(place: str, block: object) -> tuple[int, int] | None:
    sizes = block if isinstance(block, list) else []
    is_block = len(sizes) == 2 and all(type(size) is int and 0 < size <= 2**16 for size in sizes)
    _require(block is None or is_block, place, "weight_block_size", block, "two sizes")
    return (sizes[0], sizes[1]) if is_block else None


def _require(is_accepted: bool, place: str, key: str, found: object, accepted: str) -> None:  # noqa: FBT001
    require(is_accepted, f"{place}: {key} of quantization_config is {found!r:.200}; accepted: {accepted}. {INSTEAD}")
