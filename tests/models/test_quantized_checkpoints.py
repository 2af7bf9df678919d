"""FP8 and compressed-tensors checkpoints are dequantised by their formula; others are refused by name."""

import logging
from collections.abc import Callable
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model_folders import BARE, write_json
from tests.models.model_families import (
    TEXTS,
    ServedModel,
    edit_json,
    edit_weights,
    largest_difference,
    reference,
    refuse,
    write_family,
)
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.folder import read_model_folder

BLOCK = (20, 32)
"""The last blocks of a weight are smaller. transformers cannot read these."""

Q_PROJ = "layers.0.self_attn.q_proj.weight"

Quantised = tuple[Tensor, Tensor, Tensor]
"""What is stored of a weight, its scale, and the product."""


def fp8(weight: Tensor, scale: Tensor, factors: Tensor) -> Quantised:
    stored = (weight / factors).to(torch.float8_e4m3fn)
    return stored, scale, stored.float() * factors


def by_tensor(weight: Tensor) -> Quantised:
    scale = weight.abs().max() / 448
    return fp8(weight, scale, scale)


def by_row(weight: Tensor) -> Quantised:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return fp8(weight, scale, scale)


def by_block(weight: Tensor, block: tuple[int, int] = BLOCK) -> Quantised:
    scale = torch.empty([ceil(size / width) for size, width in zip(weight.shape, block, strict=True)])
    factors = torch.empty_like(weight)
    for row, column in ((row, column) for row in range(scale.shape[0]) for column in range(scale.shape[1])):
        where = (
            slice(row * block[0], (row + 1) * block[0]),
            slice(column * block[1], (column + 1) * block[1]),
        )
        scale[row, column] = factors[where] = weight[where].abs().max() / 448
    return fp8(weight, scale, factors)


def in_int8(weight: Tensor) -> Quantised:
    scale = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scale).round().to(torch.int8)
    return stored, scale, stored.float() * scale


def compressed(**weights: object) -> dict[str, Any]:
    kind = {"num_bits": 8, "type": "float", "symmetric": True} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if weights.get("type") == "int" else "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": kind}},
        "ignore": ["lm_head"],
    }


KINDS: dict[str, tuple[dict[str, Any], str, Callable[[Tensor], Quantised]]] = {
    "FP8 by block": ({"quant_method": "fp8", "weight_block_size": [*BLOCK]}, "weight_scale_inv", by_block),
    "FP8 by tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", by_tensor),
    "compressed-tensors by row": (compressed(strategy="channel"), "weight_scale", by_row),
    "compressed-tensors by tensor": (compressed(strategy="tensor"), "weight_scale", by_tensor),
    "compressed-tensors by block": (compressed(strategy="block", block_structure=[*BLOCK]), "weight_scale", by_block),
    "compressed-tensors in int8": (compressed(strategy="channel", type="int"), "weight_scale", in_int8),
}


def quantise(path: Path, plain: Path, scale_name: str, kind: Callable[[Tensor], Quantised]) -> None:
    """Quantise a folder's linear layers, and write their products to the folder ``plain``."""
    products: dict[str, Tensor] = {}

    def edit(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if name.endswith("_proj.weight")]:
            stored, scale, products[name] = kind(weights[name])
            weights[name], weights[name.replace("weight", scale_name)] = stored, scale.clone()
            weights[name.replace("weight", "input_scale")] = torch.ones(1)

    edit_weights(path / "model.safetensors", edit)
    edit_weights(plain / "model.safetensors", lambda weights: weights.update(products))
    assert products


@pytest.mark.parametrize("name", KINDS)
async def test_dequantised_weights_are_those_of_the_formula(
    name: str, tmp_path: Path, record_agreement: Any, caplog: pytest.LogCaptureFixture
):
    declared, scale_name, kind = KINDS[name]
    path, plain = write_family(tmp_path / "quantised", "qwen3"), write_family(tmp_path / "plain", "qwen3")
    original = await ServedModel(plain).embed(TEXTS)
    quantise(path, plain, scale_name, kind)
    edit_json(path / "config.json", lambda config: config.update(quantization_config=declared))
    caplog.set_level(logging.INFO)
    ours, expected = await ServedModel(path).embed(TEXTS), await ServedModel(plain).embed(TEXTS)
    assert largest_difference(expected, original) > 1e-3
    assert f"weights in {declared['quant_method'].replace('fp8', 'FP8')}" in caplog.text
    differs = largest_difference(ours, expected)
    assert differs < 1e-5
    record_agreement(f"qwen3, {name}", "embed", "the dequantised weights", differs)


async def test_blocks_are_dequantised_as_by_transformers(tmp_path: Path, record_agreement: Any):
    path, plain = write_family(tmp_path / "quantised", "qwen3"), write_family(tmp_path / "plain", "qwen3")
    quantise(path, plain, "weight_scale_inv", partial(by_block, block=(16, 16)))
    declared = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    edit_json(path / "config.json", lambda config: config.update(quantization_config=declared))
    differs = largest_difference(await ServedModel(path).embed(TEXTS), reference(path).encode(list(TEXTS)))
    assert differs < 1e-5
    record_agreement("qwen3, FP8 by block", "embed", "sentence-transformers with accelerate", differs)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        *(
            (
                {"quant_method": name},
                f"quant_method of quantization_config is '{name}'; accepted: fp8, compressed-tensors",
            )
            for name in ("gptq", "awq", "bitsandbytes", "torchao", "fbgemm_fp8")
        ),
        ({"load_in_4bit": True}, "quant_method of quantization_config is 'bitsandbytes'; .* --dtype int8 quantises"),
        (compressed(num_bits=4, strategy="channel"), "config_groups of quantization_config is .*accepted: 8 bits"),
        (compressed(symmetric=False, strategy="channel"), "config_groups of quantization_config is .*symmetric"),
        (
            compressed(strategy="group", group_size=128),
            "config_groups of quantization_config is .*tensor, channel, block",
        ),
        (
            compressed(strategy="channel") | {"format": "pack-quantized"},
            "format .* is 'pack-quantized'; accepted: float-",
        ),
        (
            compressed(strategy="channel") | {"transform_config": {"config_groups": {"u": {}}}},
            "transform_config of quantization_config is .*; accepted: none",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [0, 128]},
            r"weight_block_size of .* is \[0, 128\]; accepted: two",
        ),
    ],
)
def test_other_quantisations_are_refused_by_name(declared: dict[str, Any], said: str, tmp_path: Path):
    write_json(tmp_path / "config.json", BARE | {"quantization_config": declared})
    with pytest.raises(ModelLoadError, match=rf"config\.json: {said}"):
        read_model_folder(tmp_path)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda weights: weights.pop(f"{Q_PROJ}_scale"),
            "q_proj.weight is stored in .* no scale",
        ),
        (lambda weights: weights.pop(Q_PROJ), "q_proj.weight_scale, but no matrix"),
        (
            lambda weights: weights.update({f"{Q_PROJ}_scale": torch.ones(3)}),
            r"q_proj.weight_scale is \[3\] for a weight \[32, 32\]",
        ),
        (
            lambda weights: weights.update({f"{Q_PROJ}_zero_point": torch.ones(32, 1)}),
            "weight_zero_point, which cannot be dequantised",
        ),
        (
            lambda weights: weights.update({"layers.0.self_attn.q_proj.bias": weights[Q_PROJ][0].clone()}),
            "q_proj.bias is stored in torch.float8_e4m3fn, and the checkpoint has no scale of it",
        ),
        (
            lambda weights: weights.update({"layers.0.experts_scale_inv": torch.ones(2)}),
            "experts_scale_inv, which cannot be dequantised",
        ),
        (
            lambda weights: weights.update({Q_PROJ: weights[Q_PROJ].to(torch.int8)}),
            "q_proj.weight is in torch.int8 and .* in torch.float32, which is not compressed-tensors",
        ),
        (
            lambda weights: weights.update({f"{Q_PROJ}_scale": torch.ones(32, 1, dtype=torch.uint8)}),
            "q_proj.weight is in torch.float8_e4m3fn and .* in torch.uint8",
        ),
    ],
)
def test_scales_that_do_not_fit_are_refused(edit: Callable[[dict[str, Tensor]], object], said: str, tmp_path: Path):
    path, plain = write_family(tmp_path / "quantised", "qwen3"), write_family(tmp_path / "plain", "qwen3")
    quantise(path, plain, "weight_scale", by_row)
    edit_json(path / "config.json", lambda config: config.update(quantization_config=compressed(strategy="channel")))
    edit_weights(path / "model.safetensors", edit)
    refuse(path, said)
