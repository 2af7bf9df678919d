"""Models in int8: near float32, refused if not, cached, and their agreement told."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import client_of, listening, running
from tests.models.model_families import TEXTS, ServedModel, load, write_family
from trio_pool_serve.config import Config, ModelConfig, ProcessesConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.sample_prompts import CALIBRATION, HELD_OUT, MAX_TOKENS, sample_prompts
from trio_pool_serve.runner.openvino import preparation
from trio_pool_serve.service import Service

pytest.importorskip("nncf")

INT8: dict[str, Any] = {"dtype": "int8", "backend": "auto"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("model") / "bert", "bert")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


async def test_vectors_in_int8_are_near_those_in_float32(model: Path, cache: str):
    exact = await ServedModel(model).embed(TEXTS)
    served = ServedModel(model, dtype="int8", settings={"backend": "auto", "cache_dir": cache})
    ours = await served.embed(TEXTS)
    cosines = [float(a @ b) for a, b in zip(ours, exact, strict=True)]  # of unit length
    assert 0.98 < sum(cosines) / len(cosines) < 1 - 1e-6
    assert "int8 on cpu" in str(served.runner.facts)
    facts = served.runner.facts
    assert f"cosine with float32: mean {facts.cosine_with_float32:.4f}, lowest 0.9" in str(facts)


async def test_the_second_start_does_not_quantise_and_the_agreement_is_in_the_list_of_models(
    model: Path, cache: str, monkeypatch: pytest.MonkeyPatch
):
    first = load(model, cache_dir=cache, **INT8)
    monkeypatch.setattr(preparation.Preparation, "_quantize", None)
    config = Config(
        models=(str(model),),
        loading=ModelConfig(device="cpu", cache_dir=cache, **INT8),
        processes=ProcessesConfig(engine="local"),
    )
    async with running(Service(config)) as service, listening(service) as url, client_of(url) as client:
        (card,) = (await client.get("/v1/models")).json()["data"]
    assert card["cosine_with_float32"] == round(first.facts.cosine_with_float32 or 0, 4) > 0.98


async def test_other_models_have_no_agreement_in_the_list(client):
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert "cosine_with_float32" not in card


@pytest.mark.slow
@pytest.mark.parametrize(("saturates", "attempts"), [(False, [False]), (True, [False, True])])
def test_where_sums_overflow_the_better_of_two_ranges_is_taken(
    model: Path, monkeypatch: pytest.MonkeyPatch, saturates: bool, attempts: list[bool]
):
    quantize, agreement, attempted, found = preparation.quantize, preparation.agreement, [], []

    def noted(*arguments: Any, halves_range: bool, **options: Any) -> Any:
        attempted.append(halves_range)
        return quantize(*arguments, halves_range=halves_range, **options)

    def compared(*arguments: Any, **options: Any) -> Any:
        found.append(agreement(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(preparation, "GOOD_INT8_COSINE", 1.1)
    monkeypatch.setattr(preparation, "saturates_int8", lambda: saturates)
    monkeypatch.setattr(preparation, "quantize", noted)
    monkeypatch.setattr(preparation, "agreement", compared)
    runner = load(model, cache_dir="", **INT8)
    assert attempted == attempts
    _before, *quantized = found
    assert runner.facts.cosine_with_float32 == max(each.mean() for each in quantized[: len(attempts)])


def test_a_model_whose_output_differs_too_much_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preparation, "MIN_INT8_COSINE", 0.99999)
    refusal = r"--dtype int8: in int8 the model's output differs too much from float32: cosine 0\.99\d\d on average, "
    with pytest.raises(ModelLoadError, match=refusal):
        load(model, cache_dir="", **INT8)


def test_sample_prompts_are_a_model_s_own_inputs_and_none_serves_for_both(model: Path):
    folder = read_model_folder(model)
    calibration, held_out = ([prompt.token_ids.tolist() for prompt in prompts] for prompts in sample_prompts(folder))
    lengths = [len(token_ids) for token_ids in (*calibration, *held_out)]
    assert (len(calibration), len(held_out)) == (48, 24)
    assert min(lengths) < 10
    assert max(lengths) == min(MAX_TOKENS, folder.max_model_len)
    assert not {*CALIBRATION} & {*HELD_OUT}
    again = [[prompt.token_ids.tolist() for prompt in prompts] for prompts in sample_prompts(folder)]
    assert again == [calibration, held_out]
