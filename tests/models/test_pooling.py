"""Pooling types, heads, dimensions and their settings, against sentence-transformers' modules of the same names."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor

from tests.models.model_families import (
    HIDDEN,
    IDENTITY,
    LEGACY_DENSE,
    TEXTS,
    UNIT_LENGTH,
    Module,
    ServedModel,
    dense,
    edit_json,
    largest_difference,
    legacy_pooling,
    pooling,
    reference,
    write_family,
    write_weighted_layers,
)
from trio_pool_serve.config import Config, ModelConfig
from trio_pool_serve.models.files.folder_files import ModuleFiles
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.sentence_modules import load_pooler
from trio_pool_serve.models.model_kind import pooling_modes
from trio_pool_serve.runner.heads.pooling import Pooler
from trio_pool_serve.runner.row_states import RowStates
from trio_pool_serve.types import Batch, Embed, PoolingRequest, RenderedPrompt

TOLERANCE = 1e-5
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
CONCATENATIONS = (("cls", "mean"), ("mean", "cls"), ("lasttoken", "max", "weightedmean"), MODES)
LENGTHS = (1, 9, 4, 2, 9)


@pytest.fixture(scope="module")
def states() -> Tensor:
    return torch.randn(len(LENGTHS), max(LENGTHS), HIDDEN, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def mask() -> Tensor:
    """Right padding."""
    return torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)


def pooler(config: dict[str, Any]) -> Pooler:
    return load_pooler((ModuleFiles(name="Pooling", path=Path(), config=config),), torch.device("cpu"))


def pooled(pool: Pooler, states: Tensor, lengths: Sequence[int] = LENGTHS, skipped: int = 0) -> Tensor:
    return pool(RowStates.of_output(states, np.array(lengths)), np.full(len(lengths), skipped))


def pooled_by_sentence_transformers(
    modes: Sequence[str], states: Tensor, mask: Tensor, *, prompt_length: int = 0
) -> Tensor:
    module = Pooling(HIDDEN, pooling_mode=tuple(modes), include_prompt=prompt_length == 0)
    features = {"token_embeddings": states, "attention_mask": mask.long(), "prompt_length": prompt_length}
    return module(features)["sentence_embedding"]


# -- pooling types --------------------------------------------------------------------------------------


@pytest.mark.parametrize("modes", [*((mode,) for mode in MODES), *CONCATENATIONS], ids="+".join)
def test_pooling_types_agree_alone_and_concatenated(modes: tuple[str, ...], states: Tensor, mask: Tensor):
    """The padding has states, too, which are never looked at."""
    expected = pooled_by_sentence_transformers(modes, states, mask)
    torch.testing.assert_close(pooled(pooler({"pooling_mode": list(modes)}), states), expected, atol=1e-6, rtol=0)


def test_half_precision_states_are_pooled_in_float32(states: Tensor):
    halves = states.bfloat16()
    pool = pooler({"pooling_mode": "mean"})
    assert torch.equal(pooled(pool, halves), pooled(pool, halves.float()))


SWITCHES = ("lasttoken", "mean_tokens", "cls_token", "max_tokens", "weightedmean_tokens", "mean_sqrt_len_tokens")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(legacy_pooling(*SWITCHES).config, MODES, id="legacy switches: sentence-transformers' order"),
        pytest.param(legacy_pooling().config, ("mean",), id="no switch"),
        pytest.param({"pooling_mode": ["mean", "cls"]}, ("mean", "cls"), id="the new spelling: its own order"),
        pytest.param({"pooling_mode": "max", "pooling_mode_mean_tokens": True}, ("max",), id="the new spelling wins"),
    ],
)
def test_pooling_types_are_read_in_both_spellings(config: Any, expected: tuple[str, ...]):
    assert pooling_modes(config) == expected


# -- whole models -----------------------------------------------------------------------------------------

BuildModel = Callable[..., Path]


@pytest.fixture
def model(tmp_path: Path) -> BuildModel:
    """Write a BERT with the modules given behind it."""
    return lambda *modules: write_family(tmp_path / "model", "bert", modules=modules)


HEADS = {
    "three legacy switches": [legacy_pooling("cls_token", "max_tokens", "mean_tokens")],
    "concatenation and normalize": [pooling(["lasttoken", "mean"]), UNIT_LENGTH],
    "dense": [pooling("mean"), dense()],
    "dense from a .bin": [pooling("mean"), dense(weights_file="pytorch_model.bin")],
    "dense without bias": [pooling("mean"), dense(bias=False, activation=IDENTITY)],
    "dense with another activation": [pooling("mean"), dense(activation="torch.nn.modules.activation.GELU")],
    "dense with a residual": [pooling("mean"), dense(use_residual=True)],
    "dense with a residual of another width": [pooling("mean"), dense(HIDDEN, 12, use_residual=True)],
    "dense of old": [pooling("mean"), LEGACY_DENSE],
    "two dense and normalize": [pooling(["cls", "mean"]), dense(2 * HIDDEN, 40), dense(40, 16), UNIT_LENGTH],
    "normalize in the middle": [pooling("mean"), UNIT_LENGTH, dense()],
}


@pytest.mark.parametrize("modules", HEADS.values(), ids=HEADS)
async def test_heads_agree(model: BuildModel, modules: list[Module]):
    path = model(*modules)
    assert largest_difference(await ServedModel(path).embed(TEXTS), reference(path).encode(list(TEXTS))) < TOLERANCE


@pytest.mark.parametrize("mode", MODES)
async def test_an_instruction_that_is_not_pooled_agrees(model: BuildModel, mode: str):
    """As Instructor's: the model reads the instruction, the pooler does not."""
    path = model(pooling(mode, include_prompt=False), UNIT_LENGTH)
    texts = [text for text in TEXTS if text]
    instruction = "Represent the sentence: "
    rows = await ServedModel(path).embed(texts, instruction=instruction)
    assert largest_difference(rows, reference(path).encode(texts, prompt=instruction)) < TOLERANCE


async def test_an_input_that_is_all_instruction_is_pooled_whole(model: BuildModel):
    """sentence-transformers would pool nothing, and answer zeros or infinities."""
    served = ServedModel(model(pooling("mean", include_prompt=False)))
    ids = np.array([2, 7, 8, 3], dtype=np.int32)
    prompts = RenderedPrompt(ids), RenderedPrompt(ids, instruction_tokens=4)
    (plain,), (filled,) = await served.runner.launch(Batch(tuple(map(PoolingRequest, prompts))))
    assert np.array_equal(plain, filled)


# -- matryoshka and normalisation ---------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "normalizes"), [("bert", True), ("roberta", False)])
async def test_each_row_of_a_batch_is_cut_first_and_then_normalized_as_wanted(
    family: str, tmp_path: Path, *, normalizes: bool
):
    served = ServedModel(write_family(tmp_path / family, family))
    [whole] = await served.embed(TEXTS[:1], Embed(normalize=False))
    assert np.linalg.norm(whole) != pytest.approx(1, abs=1e-2)
    wanted = [Embed(length, normalize) for length in (None, 1, 7, HIDDEN) for normalize in (None, True, False)]
    rows = await served.embed(TEXTS[:1] * len(wanted), wanted)
    for row, params in zip(rows, wanted, strict=True):
        is_unit = normalizes if params.normalize is None else params.normalize
        cut = whole[: params.dimensions]
        assert largest_difference([row], [cut / np.linalg.norm(cut) if is_unit else cut]) < TOLERANCE
        if params.normalize is not False:
            oracle = reference(served.path, truncate_dim=params.dimensions)
            assert largest_difference([row], oracle.encode(TEXTS[:1], normalize_embeddings=is_unit)) < TOLERANCE


# -- ``--pooling``, ``--normalize``, and folders that declare neither ------------------------------------------------

SETTINGS = {
    "cls": "cls",
    "mean": "mean",
    "last": "lasttoken",
    "max": "max",
    "weightedmean": "weightedmean",
    "mean_sqrt_len": "mean_sqrt_len_tokens",
}
"""Our names and sentence-transformers'."""


def settings_of(model: ModelConfig) -> ModelConfig:
    return Config(models=("m",), loading=model).sources[0].loading


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("mode", SETTINGS)
async def test_a_bare_transformer_is_pooled_as_told(mode: str, *, normalize: bool, tmp_path: Path):
    bare = write_family(tmp_path / "bare", "bert", modules=())
    (bare / "modules.json").unlink()
    ours = ServedModel(bare, settings={"pooling": mode, "normalize": normalize})
    declared = [pooling(SETTINGS[mode]), *([UNIT_LENGTH] if normalize else [])]
    theirs = reference(write_family(tmp_path / "declared", "bert", modules=declared))
    assert largest_difference(await ours.embed(TEXTS), theirs.encode(list(TEXTS))) < TOLERANCE
    assert ours.folder.spec.assumption == ""


@pytest.mark.parametrize(
    ("settings", "modules"),
    [
        ({"pooling": "cls"}, [pooling("cls"), UNIT_LENGTH]),
        ({"normalize": False}, [pooling("mean")]),
        ({"pooling": "last", "normalize": False}, [pooling("lasttoken")]),
        ({"normalize": True}, [pooling("mean"), UNIT_LENGTH]),
    ],
)
async def test_settings_count_for_more_than_the_files(settings: dict, modules: list[Module], tmp_path: Path):
    declared = write_family(tmp_path / "declared", "qwen3", modules=[pooling("mean"), UNIT_LENGTH])
    theirs = reference(write_family(tmp_path / "meant", "qwen3", modules=modules))
    ours = ServedModel(declared, settings=settings)
    assert largest_difference(await ours.embed(TEXTS), theirs.encode(list(TEXTS))) < TOLERANCE


async def test_weighted_layers_are_pooled_as_told_and_left_out_without_hidden_states(tmp_path: Path):
    """sentence-transformers leaves them out without a word."""
    weighted, ignored = [
        write_weighted_layers(tmp_path / str(on), "bert", has_hidden_states=on) for on in (True, False)
    ]
    ours = ServedModel(weighted, settings={"pooling": "cls", "normalize": False})
    edit_json(weighted / "2_Pooling" / "config.json", lambda config: config.update(pooling_mode="cls"))
    edit_json(weighted / "modules.json", lambda modules: modules[:-1])
    assert largest_difference(await ours.embed(TEXTS), reference(weighted).encode(list(TEXTS))) < TOLERANCE
    assert (ours.folder.spec.pooling, ours.folder.spec.assumption) == ("cls", "")
    without = ServedModel(ignored)
    found = await without.embed(TEXTS)
    assert largest_difference(found, reference(ignored).encode(list(TEXTS))) < TOLERANCE
    assert largest_difference(found, await ServedModel(weighted, settings={"pooling": "mean"}).embed(TEXTS)) > 0.1
    assert "WeightedLayerPooling has no effect" in without.folder.spec.assumption
    assert [module.name for module in without.folder.spec.modules] == ["Pooling", "Normalize"]


@pytest.mark.parametrize(
    ("family", "vllm", "tei"),
    [
        ("bert", "vLLM CLS pooling and normalisation", "CLS pooling and normalisation"),
        ("modernbert", "vLLM CLS pooling and normalisation", "CLS pooling and normalisation"),
        ("mpnet", "vLLM CLS pooling and normalisation", "refuses the model"),
        ("qwen3", "vLLM LAST pooling and normalisation", "refuses the model"),
    ],
)
def test_what_is_assumed_is_said_with_what_others_would_assume(family: str, vllm: str, tei: str, tmp_path: Path):
    bare = write_family(tmp_path / family, family, modules=())
    (bare / "modules.json").unlink()
    said = read_model_folder(bare).spec.assumption
    assert "This server assumes mean pooling and no normalisation;" in said
    assert vllm in said
    assert f"text-embeddings-inference {tei}." in said
    half = read_model_folder(bare, ModelConfig(pooling="cls")).spec.assumption
    assert "This server assumes cls pooling and no normalisation;" in half
    assert read_model_folder(bare, ModelConfig(pooling="cls", normalize=True)).spec.assumption == ""
    assert read_model_folder(write_family(tmp_path / "declared", family)).spec.assumption == ""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("BertForMaskedLM", "--no-normalize. For SPLADE: --task sparse_embed."),
        ("Qwen3ForCausalLM", "If it is, set --task embed to score by its vectors."),
        ("BertModel", "or --no-normalize."),
    ],
)
def test_what_is_assumed_is_said_with_what_the_model_may_be_for(name: str, said: str, tmp_path: Path):
    bare = write_family(tmp_path / "bare", "bert", modules=())
    (bare / "modules.json").unlink()
    edit_json(bare / "config.json", lambda config: config.update(architectures=[name]))
    assert read_model_folder(bare).spec.assumption.endswith(said)


@pytest.mark.parametrize(("config", "pooling_type"), [({}, "lasttoken"), ({"is_causal": False}, "mean")])
async def test_a_bare_decoder_is_pooled_as_sentence_transformers_does(config: dict, pooling_type: str, tmp_path: Path):
    bare = write_family(tmp_path / "qwen3", "qwen3", modules=())
    (bare / "modules.json").unlink()
    edit_json(bare / "config.json", lambda whole: whole | {"architectures": ["Qwen3ForCausalLM"]} | config)
    ours = ServedModel(bare)
    assert f"This server assumes {pooling_type} pooling and no normalisation;" in ours.folder.spec.assumption
    assert largest_difference(await ours.embed(TEXTS), reference(bare).encode(list(TEXTS))) < TOLERANCE


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ('{"pooling_type": "CLS"}', {"pooling": "cls"}),
        ('{"seq_pooling_type": "MEAN", "use_activation": true}', {"pooling": "mean", "normalize": True}),
        ('{"pooling_type": "LAST", "normalize": false}', {"pooling": "last", "normalize": False}),
        ('{"pooling_type": "ALL", "task": "token_embed"}', {"task": "token_embed"}),
        ('{"tok_pooling_type": "STEP", "step_tag_id": 3, "returned_token_ids": [1, 2]}', {}),
        ('{"enable_chunked_processing": true, "max_embed_len": 3072000}', {"long_text": "chunk"}),
        ('{"enable_chunked_processing": false, "use_activation": null}', {}),
        ('{"use_activation": "false", "step_tag_id": "5"}', {"normalize": False}),
        ('{"enable_chunked_processing": "false"}', {}),
        ("{}", {}),
    ],
)
def test_vllm_s_pooler_config_is_understood(given: str, meant: dict):
    assert settings_of(ModelConfig(pooler_config=given)) == ModelConfig(pooler_config=given, **meant)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pooler_config": "CLS"}, "is not a JSON object"),
        ({"pooler_config": "[]"}, "Expected `object`"),
        ({"pooler_config": '{"pooling_type": "cls"}'}, "pooling_type is 'cls'; accepted: CLS, LAST"),
        ({"pooler_config": '{"pooling_type": ["CLS"]}'}, "pooling_type"),
        ({"pooler_config": '{"seq_pooling_type": "ALL"}'}, "seq_pooling_type is 'ALL'; accepted: CLS, LAST, MEAN"),
        ({"pooler_config": '{"pooling_type": "CLS", "seq_pooling_type": "MEAN"}'}, "Set either pooling_type"),
        ({"pooler_config": '{"use_activation": true, "normalize": false}'}, "are one setting, but differ"),
        ({"pooler_config": '{"pooling": "CLS"}'}, "Unknown field pooling; did you mean pooling_type?"),
        ({"pooler_config": '{"logit_mean": 0.5}'}, "Unknown field logit_mean; accepted: task"),
        ({"pooler_config": '{"dimensions": 64}'}, "Unknown field dimensions"),
        ({"pooler_config": '{"task": "plugin"}'}, "task is 'plugin'; accepted: embed"),
        ({"pooler_config": '{"returned_token_ids": 5}'}, "returned_token_ids"),
        ({"pooler_config": '{"step_tag_id": -1}'}, "step_tag_id"),
        (
            {"pooler_config": '{"pooling_type": "CLS"}', "pooling": "mean"},
            "pooling to 'cls', but --pooling is 'mean'",
        ),
        ({"pooler_config": '{"use_activation": true}', "normalize": False}, "but --normalize is False"),
    ],
)
def test_what_is_not_understood_or_contradicts_is_refused(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        settings_of(ModelConfig(**settings))
