"""Other ways to compute padded rows give what the model gives by itself; settings that make no sense are refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from tests.models.model_families import FAMILIES, TEXTS, ServedModel, largest_difference, write_family
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.runner.loaded_model import LoadingParams
from trio_pool_serve.runner.padded_or_packed import refuse_impossible
from trio_pool_serve.runner.transformer_masks import skip_mask_checks

TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def _stance() -> Iterator[None]:
    yield
    torch.compiler.set_stance("default")
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own code
@pytest.mark.parametrize("name", ["modernbert", "qwen3"])
async def test_a_compiled_family_agrees_in_any_thread_without_compiling_again(tmp_path: Path, name: str):
    path = write_family(tmp_path / name, name)
    expected = await ServedModel(path).embed(TEXTS)
    served = ServedModel(path, settings={"backend": "compile"})
    assert str(served.runner.facts).endswith("compiled")
    torch.compiler.set_stance("fail_on_recompile")

    def embed_together_and_alone() -> tuple[list, list]:
        together = trio.run(served.embed, TEXTS)
        return together, [trio.run(served.embed, [text])[0] for text in TEXTS]

    for rows in await trio.to_thread.run_sync(embed_together_and_alone):
        assert largest_difference(rows, expected) < TOLERANCE


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
    backbone: Any = None
    params = LoadingParams(device=torch.device(device), dtype=torch.float32, pad_token_id=0, max_tokens=8)
    with pytest.raises(ModelLoadError, match=refusal):
        refuse_impossible(backbone, ModelConfig(**settings), params)
