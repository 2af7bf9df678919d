"""Quantised checkpoints whose weights are dequantised when they are loaded: FP8 and compressed-tensors of 8 bits."""

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from trio_pool_serve.errors import ModelLoadError

FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
STRATEGIES = ("tensor", "channel", "block")

INSTEAD = "Serve the unquantised checkpoint that it was made of; on CPU, --dtype int8 quantises that."


@frozen
class Quantization:
    """How weights are stored."""

    name: str
    """For people."""
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
    method = declared.get("quant_method")
    if method == "fp8":
        return Quantization("FP8", block=_block(place, declared.get("weight_block_size")))
    if method != "compressed-tensors":
        found = "bitsandbytes" if declared.get("load_in_4bit") or declared.get("load_in_8bit") else method
        raise _refusal(place, "quant_method", found, "fp8, compressed-tensors")
    groups = [group.get("weights") or {} for group in (declared.get("config_groups") or {}).values()]
    for weights in groups:
        kind = weights.get("num_bits"), weights.get("symmetric", True), weights.get("strategy") in STRATEGIES
        if kind != (8, True, True):
            raise _refusal(place, "config_groups", weights, f"8 bits, symmetric, by {', '.join(STRATEGIES)}")
    if declared.get("format") not in FORMATS:
        raise _refusal(place, "format", declared.get("format"), ", ".join(FORMATS))
    for key in ("sparsity_config", "transform_config"):
        section = declared.get(key) or {}
        if section.get("format", "dense") != "dense" or section.get("config_groups"):
            raise _refusal(place, key, section, "none")
    blocks = {_block(place, weights.get("block_structure")) for weights in groups}
    is_float = any(weights.get("type") == "float" for weights in groups)
    block = next(iter(blocks)) if len(blocks) == 1 else None
    return Quantization(f"compressed-tensors ({declared['format']})", is_float, block)


def _block(place: str, block: object) -> tuple[int, int] | None:
    if block is None:
        return None
    if isinstance(block, list) and len(block) == 2 and all(type(size) is int and 0 < size <= 2**16 for size in block):
        return block[0], block[1]
    raise _refusal(place, "weight_block_size", block, "two sizes")


def _refusal(place: str, key: str, found: object, accepted: str) -> ModelLoadError:
    return ModelLoadError(f"{place}: {key} of quantization_config is {found!r:.200}; accepted: {accepted}. {INSTEAD}")
