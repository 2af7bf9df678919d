"""The files of a LoRA adapter are read as PEFT reads them, or refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.adapter_folders import factors, write_adapter
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.adapter_files import read_adapter

A, B = factors()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; accepted: 'LORA'"),
        ({"use_dora": True}, "use_dora is True, which is not supported: the adapter would be applied without it"),
        ({"bias": "lora_only"}, "bias is 'lora_only'; accepted: 'none'"),
        *(
            ({"init_lora_weights": name}, f"init_lora_weights is '{name}'; accepted: True, .*others change the base")
            for name in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")
        ),
        *(
            ({key: value}, f"{key} is .*not supported")
            for key, value in (
                ("layer_replication", [[0, 2]]),
                ("trainable_token_indices", [1]),
                ("lora_bias", True),
                ("target_parameters", ["experts.down_proj"]),
                ("use_qalora", True),
                ("alora_invocation_tokens", [3]),
                ("kasa_config", {"alpha": 1}),
                ("ensure_weight_tying", True),
                ("telepathy", 1),
            )
        ),
        *(({"r": r}, "r is .*accepted: a whole number from 1 to 4096") for r in (0, -1, 5000, 2.0, True, "2", None)),
        *(({"lora_alpha": alpha}, "lora_alpha is .*accepted: a number") for alpha in ("4", None, float("nan"), 1e300)),
        ({"rank_pattern": {"query": 0}}, "rank_pattern is .*accepted: simple patterns"),
        ({"rank_pattern": ["query"]}, "rank_pattern is .*accepted: simple patterns"),
        *(
            ({"alpha_pattern": {pattern: 1}}, "alpha_pattern is .*accepted: simple patterns")
            for pattern in ("(a+)+", "(a|a)*b", ".*a.*b.*c", "(", "a?" * 28 + "a" * 28, "(a|a)" * 28)
        ),
        ({"modules_to_save": "score"}, "modules_to_save is 'score'; accepted: names"),
        ({"base_model_name_or_path": 3}, "base_model_name_or_path is 3"),
    ],
)
def test_a_config_that_changes_what_lora_computes_is_refused_by_its_key(
    tmp_path: Path, config: dict[str, Any], said: str
):
    with pytest.raises(ModelLoadError, match=rf"adapter_config\.json: {said}"):
        read_adapter(write_adapter(tmp_path, **config))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "contains no tensors"),
        ({A: factors()[A]}, "encoder.query lacks lora_B"),
        ({B: factors()[B]}, "encoder.query lacks lora_A"),
        ({**factors(), A: factors()[A].T}, r"lora_A \[3, 2\] and lora_B \[4, 2\]; with r = 2 .* \[2, in\]"),
        (factors(r=3), r"lora_A \[3, 3\] and lora_B \[4, 3\]; with r = 2"),
        ({**factors(), A: factors()[A][..., None]}, r"lora_A \[2, 3, 1\]"),
        ({**factors(), A: factors()[A] + np.inf}, "query.lora_A.weight contains infinities or NaN"),
        ({**factors(), B: factors()[B].astype(np.int32)}, "query.lora_B.weight is in I32; accepted: F32"),
        ({**factors(), B.replace("lora_B", "lora_magnitude_vector"): factors()[B]}, "magnitude_vector.weight is not"),
        ({**factors(), B.replace("weight", "bias"): factors()[B]}, "lora_B.bias is not a tensor of a plain LoRA"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_those_of_the_config_are_refused_by_name(
    tmp_path: Path, tensors: dict[str, Any], said: str
):
    with pytest.raises(ModelLoadError, match=said):
        read_adapter(write_adapter(tmp_path, tensors))


def test_weights_are_read_from_safetensors_only(tmp_path: Path):
    weights = write_adapter(tmp_path) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelLoadError, match=r"adapter_model\.safetensors cannot be read"):
        read_adapter(tmp_path)
    weights.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelLoadError, match=r"only adapter_model\.bin, which can contain code.*in adapter_model"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_model.bin").unlink()
    with pytest.raises(ModelLoadError, match="contains no weights"):
        read_adapter(tmp_path)


def test_factors_scales_and_whole_weights_are_sorted_by_module(tmp_path: Path):
    tensors = factors("a.query", r=2) | factors("b.query", r=4) | factors("word", kind="lora_embedding_{}")
    tensors |= {"base_model.model.word.base_layer.weight": np.ones(4), "base_model.model.score.bias": np.zeros(1)}
    patterns = {"rank_pattern": {"b.query": 4}, "alpha_pattern": {r"[ab]\.query": 6, "query": 9}}
    adapter = read_adapter(
        write_adapter(tmp_path, tensors, use_rslora=True, **patterns, modules_to_save=["score"], revision="main")
    )
    assert {name: update.scale for name, update in adapter.updates.items()} == {
        "a.query": 6 / 2**0.5,
        "b.query": 6 / 4**0.5,
        "word": 4 / 2**0.5,
    }
    assert [name for name, update in adapter.updates.items() if update.is_embedding] == ["word"]
    for module, update in adapter.updates.items():
        name = f"base_model.model.{module}.lora_{'embedding_A' if update.is_embedding else 'A.weight'}"
        assert np.array_equal(update.down, tensors[name])
        assert np.array_equal(update.up, tensors[name.replace("A", "B")])
    assert adapter.weights.keys() == {"word.weight", "score.bias"}
    assert all(weight.dtype == np.float32 for weight in adapter.weights.values())
    assert adapter.target_modules == ("query",)
    assert adapter.modules_to_save == ("score",)
    assert adapter.base is None


def test_the_digest_covers_config_and_weights(tmp_path: Path):
    first = read_adapter(write_adapter(tmp_path / "first"))
    assert read_adapter(write_adapter(tmp_path / "copy")).digest == first.digest
    assert read_adapter(write_adapter(tmp_path / "config", lora_alpha=5)).digest != first.digest
    assert read_adapter(write_adapter(tmp_path / "weights", {**factors(), B: factors()[B] + 1})).digest != first.digest


def test_numbers_beyond_float32_are_refused(tmp_path: Path):
    tensors = {name: values.astype(np.float64) for name, values in factors().items()}
    tensors[B][0, 0] = 1e300
    with pytest.raises(ModelLoadError, match=r"lora_B\.weight contains infinities or NaN"):
        read_adapter(write_adapter(tmp_path, tensors))


def test_names_that_differ_in_the_prefix_only_are_refused(tmp_path: Path):
    tensors = factors() | {name.removeprefix("base_model.model."): values for name, values in factors().items()}
    with pytest.raises(ModelLoadError, match=r"names differ only in base_model\.model\."):
        read_adapter(write_adapter(tmp_path, tensors))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_any_floating_point_type_is_read_in_float32(tmp_path: Path, dtype: str):
    import torch
    from safetensors.torch import save_file

    stored = {name: torch.from_numpy(values).to(getattr(torch, dtype)) for name, values in factors().items()}
    save_file(stored, write_adapter(tmp_path) / "adapter_model.safetensors")
    (update,) = read_adapter(tmp_path).updates.values()
    assert update.down.dtype == np.float32
    assert np.array_equal(update.down, stored[A].float().numpy())
    assert np.array_equal(update.up, stored[B].float().numpy())
