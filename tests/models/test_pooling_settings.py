"""``--pooling``, ``--normalize`` and what is said of folders that declare neither, against sentence-transformers."""

from pathlib import Path

import pytest

from tests.models.model_families import (
    NEW_NORMALIZE,
    TEXTS,
    Module,
    ServedModel,
    edit_json,
    largest_difference,
    pooling,
    reference,
    write_family,
)
from trio_pool_serve.config import Config, ModelConfig
from trio_pool_serve.config.pooler_config import pooler_config_of
from trio_pool_serve.models.folder import read_model_folder

TOLERANCE = 1e-5
MODES = {
    "cls": "cls",
    "mean": "mean",
    "last": "lasttoken",
    "max": "max",
    "weightedmean": "weightedmean",
    "mean_sqrt_len": "mean_sqrt_len_tokens",
}
"""Our names and sentence-transformers'."""

UNIT_LENGTH = Module(type=NEW_NORMALIZE)


def settings_of(model: ModelConfig) -> ModelConfig:
    return Config(models=("m",), loading=model).sources[0].loading


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("mode", MODES)
async def test_a_bare_transformer_is_pooled_as_told(mode: str, *, normalize: bool, tmp_path: Path):
    bare = write_family(tmp_path / "bare", "bert", modules=())
    (bare / "modules.json").unlink()
    ours = ServedModel(bare, settings={"pooling": mode, "normalize": normalize})
    declared = [pooling(MODES[mode]), *([UNIT_LENGTH] if normalize else [])]
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
    assert "Assumed are mean pooling and no normalisation." in said
    assert vllm in said
    assert f"text-embeddings-inference {tei}." in said
    half = read_model_folder(bare, ModelConfig(pooling="cls")).spec.assumption
    assert "Assumed are cls pooling and no normalisation." in half
    assert read_model_folder(bare, ModelConfig(pooling="cls", normalize=True)).spec.assumption == ""


@pytest.mark.parametrize(("config", "pooling_type"), [({}, "lasttoken"), ({"is_causal": False}, "mean")])
async def test_a_bare_decoder_is_pooled_as_sentence_transformers_does(config: dict, pooling_type: str, tmp_path: Path):
    bare = write_family(tmp_path / "qwen3", "qwen3", modules=())
    (bare / "modules.json").unlink()
    edit_json(bare / "config.json", lambda whole: whole | {"architectures": ["Qwen3ForCausalLM"]} | config)
    ours = ServedModel(bare)
    assert f"Assumed are {pooling_type} pooling and no normalisation." in ours.folder.spec.assumption
    assert largest_difference(await ours.embed(TEXTS), reference(bare).encode(list(TEXTS))) < TOLERANCE


def test_nothing_is_assumed_of_what_the_files_declare(tmp_path: Path):
    assert read_model_folder(write_family(tmp_path, "bert")).spec.assumption == ""


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


def test_tokens_of_steps_are_in_vllm_s_pooler_config_only():
    given = ModelConfig(pooler_config='{"step_tag_id": "3", "returned_token_ids": [1, 2]}')
    pooler = pooler_config_of(settings_of(given))
    assert (pooler.step_tag_id, pooler.returned_token_ids) == (3, (1, 2))
    pooler = pooler_config_of(ModelConfig())
    assert (pooler.step_tag_id, pooler.returned_token_ids) == (None, ())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pooler_config": "CLS"}, "is not understood"),
        ({"pooler_config": "[]"}, "Expected `object`"),
        ({"pooler_config": '{"pooling_type": "cls"}'}, "Invalid enum value 'cls'"),
        ({"pooler_config": '{"pooling_type": ["CLS"]}'}, "pooling_type"),
        ({"pooler_config": '{"seq_pooling_type": "ALL"}'}, "Invalid enum value 'ALL'"),
        ({"pooler_config": '{"pooling_type": "CLS", "seq_pooling_type": "MEAN"}'}, "pooling_type excludes"),
        ({"pooler_config": '{"use_activation": true, "normalize": false}'}, "mean the same, but differ"),
        ({"pooler_config": '{"pooling": "CLS"}'}, "unknown field `pooling`"),
        ({"pooler_config": '{"logit_mean": 0.5}'}, "unknown field `logit_mean`"),
        ({"pooler_config": '{"dimensions": 64}'}, "unknown field `dimensions`"),
        ({"pooler_config": '{"task": "plugin"}'}, "Invalid enum value 'plugin'"),
        ({"pooler_config": '{"returned_token_ids": 5}'}, "returned_token_ids"),
        ({"pooler_config": '{"step_tag_id": -1}'}, "step_tag_id"),
        ({"pooler_config": '{"pooling_type": "CLS"}', "pooling": "mean"}, "says 'cls' where --pooling is 'mean'"),
        ({"pooler_config": '{"use_activation": true}', "normalize": False}, "where --normalize is False"),
    ],
)
def test_what_is_not_understood_or_contradicts_is_refused(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        settings_of(ModelConfig(**settings))
