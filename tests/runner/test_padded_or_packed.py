"""Other ways to compute padded rows give what the model gives by itself; settings that make no sense are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.model_families import FAMILIES, TEXTS, ServedModel, largest_difference, write_family
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.runner.loaded_model import LoadingParams
from trio_pool_serve.runner.padded_or_packed import refuse_impossible
from trio_pool_serve.runner.transformer_masks import skip_mask_checks

TOLERANCE = 1e-5


@pytest.mark.parametrize("name", FAMILIES)
async def test_masks_are_the_same_without_looking_at_them(tmp_path: Path, name: str):
    served = ServedModel(write_family(tmp_path / name, name))
    expected = await served.embed(TEXTS)
    alone = [(await served.embed([text]))[0] for text in TEXTS]
    skip_mask_checks(served.runner.loaded.backbone.model)
    assert largest_difference(await served.embed(TEXTS), expected) < TOLERANCE
    assert largest_difference([(await served.embed([text]))[0] for text in TEXTS], alone) < TOLERANCE


@pytest.mark.parametrize(
    ("settings", "device", "refusal"),
    [
        (
            {"dtype": "int8", "backend": "torch"},
            "cpu",
            "--dtype int8 requires OpenVINO on CPU",
        ),
        (
            {"dtype": "int8", "backend": "compile"},
            "cpu",
            "--dtype int8 requires OpenVINO on CPU",
        ),
        ({"dtype": "int8"}, "cuda", "--dtype int8 requires OpenVINO on CPU"),
        ({"backend": "openvino"}, "cuda", "--backend openvino computes only on CPU, not on cuda"),
    ],
)
def test_int8_and_openvino_are_for_cpus_and_int8_is_by_openvino_alone(settings: Any, device: str, refusal: str):
    params = LoadingParams(device=torch.device(device), dtype=torch.float32, pad_token_id=0, max_tokens=8)
    with pytest.raises(ModelLoadError, match=refusal):
        refuse_impossible(ModelConfig(**settings), params)
