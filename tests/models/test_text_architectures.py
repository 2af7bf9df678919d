"""Every text architecture of transformers is served as transformers computes it, or refused in a sentence."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.lanes import sampled
from tests.models.model_families import MAX_LENGTH, TEXTS, ServedModel
from tests.models.text_architectures import AGREEING, REFUSED, UNTRIED, text_architectures, write_architecture
from trio_pool_serve.config import Dtype
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.loading.architectures import ENCODER_CLASSES
from trio_pool_serve.runner import cpu_features

BOUNDS = {"float32": 1e-5, "bfloat16": 0.03}
"""Of a vector's distance from that of transformers in the same dtype, relative to its length. Random experts may be
chosen by the last bits: from float32, transformers' own bfloat16 differs by 0.25 there."""

SHORT_AND_LONG = [TEXTS[0], TEXTS[3], "Every wait can end."]
"""CANINE and Funnel take no text of a few tokens, also by transformers."""


@pytest.fixture(autouse=True)
def native_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``--dtype auto`` choose bfloat16 on any CPU."""
    monkeypatch.setattr(cpu_features, "_flags", lambda: frozenset({"amx_tile"}))


@torch.inference_mode()
def vectors_by_transformers(folder: Path, dtype: str = "float32") -> list[Any]:
    """Each text's mean of states, alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    auto_class = getattr(transformers, ENCODER_CLASSES.get(config.model_type, "AutoModel"))
    model = auto_class.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    vectors = []
    for text in SHORT_AND_LONG:
        inputs = tokenizer(text, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
        states = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
        vectors.append(states[0].float().mean(0).numpy())
    return vectors


@sampled("name", AGREEING, keep=["bert", "deberta", "fnet", "gpt2"])
async def test_an_architecture_is_computed_as_by_transformers(tmp_path: Path, name: str, record_architecture: Any):
    folder = write_architecture(tmp_path / "model", name)
    computed: list[str] = []
    dtypes: tuple[Dtype, ...] = ("auto", "float32")
    for dtype in dtypes:
        served = ServedModel(folder, dtype=dtype)
        dtype_used = "bfloat16" if "bfloat16 on cpu" in str(served.runner.facts) else "float32"
        for text, vector in zip(SHORT_AND_LONG, vectors_by_transformers(folder, dtype_used), strict=True):
            (ours,) = await served.embed([text])
            assert np.linalg.norm(ours - vector) <= BOUNDS[dtype_used] * np.linalg.norm(vector)
        computed.append(f"agrees, by torch in {dtype_used}")
    record_architecture(name, *computed)


@sampled("name", REFUSED, keep=["bart", "xmod"])
def test_an_architecture_is_refused_in_a_sentence(tmp_path: Path, name: str, record_architecture: Any):
    folder = write_architecture(tmp_path / "model", name)
    dtypes: tuple[Dtype, ...] = ("auto", "float32")
    said = []
    for dtype in dtypes:
        with pytest.raises(ModelLoadError, match=REFUSED[name]) as caught:
            ServedModel(folder, dtype=dtype)
        said.append(f"refused: {caught.value}".replace(name, "the model"))
    record_architecture(name, *said)


@pytest.mark.slow
def test_every_text_architecture_is_in_the_lists(record_architecture: Any):
    for name, reason in UNTRIED.items():
        record_architecture(name, f"not tried: it {reason}", f"not tried: it {reason}")
    assert sorted(text_architectures()) == sorted([*AGREEING, *REFUSED, *UNTRIED])


@pytest.mark.parametrize("name", ["deberta", "fnet"])
def test_bfloat16_that_cannot_be_computed_is_refused_and_auto_says_why_it_is_float32(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
):
    folder = write_architecture(tmp_path / "model", name)
    described = str(ServedModel(folder, dtype="auto").runner.facts)
    assert "float32 on cpu (auto: torch cannot compute it in bfloat16)" in described
    assert "model is computed in float32, as torch cannot compute it in bfloat16: " in caplog.text
    refused = rf"^--dtype bfloat16: torch cannot compute {name} in it \(.+\)\. Use --dtype auto or float32\.$"
    with pytest.raises(ModelLoadError, match=refused):
        ServedModel(folder, dtype="bfloat16")


async def test_openvino_computes_in_float32_what_torch_cannot_compute_in_bfloat16(tmp_path: Path):
    pytest.importorskip("openvino")
    folder = write_architecture(tmp_path / "model", "fnet")
    served = ServedModel(folder, dtype="auto", settings={"backend": "openvino", "cache_dir": str(tmp_path / "cache")})
    again = ServedModel(folder, dtype="auto", settings={"backend": "openvino", "cache_dir": str(tmp_path / "cache")})
    (expected, *_) = vectors_by_transformers(folder)
    for ours in (served, again):
        assert "float32 on cpu (auto: torch cannot compute it in bfloat16)" in str(ours.runner.facts)
        (vector,) = await ours.embed(SHORT_AND_LONG[:1])
        assert np.linalg.norm(vector - expected) <= BOUNDS["float32"] * np.linalg.norm(expected)
