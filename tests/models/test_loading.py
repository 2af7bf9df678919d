"""What cannot be loaded as asked is an error that a person can act on, never skipped or made up."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.models.model_families import (
    DENSE,
    HIDDEN,
    NEW_NORMALIZE,
    TEXTS,
    Module,
    ServedModel,
    dense,
    edit_json,
    edit_weights,
    largest_difference,
    legacy_pooling,
    load,
    pooling,
    reference,
    refuse,
    without,
    write_family,
    write_modules,
)
from tests.models.vision_families import clip
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.checkpoint import require_finite
from trio_pool_serve.models.loading.runner_loader import load_transformer
from trio_pool_serve.threads.offload import Offload


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A folder of its own, to be spoilt."""
    return write_family(tmp_path / "bert", "bert")


# -- modules ----------------------------------------------------------------------------------------------

MODELS = "sentence_transformers.models"
WITHOUT_A_SIZE = Module(type=DENSE, config={"out_features": 4}, weights={"linear.weight": torch.zeros(4, HIDDEN)})


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ([pooling("mean"), Module(type=f"{MODELS}.LayerNorm", config={"dimension": HIDDEN})], "requires LayerNorm"),
        ([Module(type=f"{MODELS}.WeightedLayerPooling"), pooling("mean")], "not followed by a Pooling module"),
        ([pooling("mean"), Module(type=f"{MODELS}.WeightedLayerPooling")], "requires WeightedLayerPooling"),
        ([pooling("mean"), Module(type=f"{MODELS}.Telepathy")], "requires Telepathy"),
        ([pooling("mean"), Module(type=f"{MODELS}.Dropout")], "requires Dropout"),
        ([pooling("mean"), Module(type="custom_st.Head")], "custom_st.Head is not one of sentence-transformers' own"),
        ([], "not followed by a Pooling module"),
        ([Module(type=NEW_NORMALIZE)], "not followed by a Pooling module"),
        ([pooling("median")], "Pooling requires median"),
        ([pooling(["mean", "median"])], "known are cls, max, mean"),
        ([pooling("mean"), dense(activation="torch.nn.modules.activation.Wish")], "Wish is not one of torch.nn's"),
        ([pooling("mean"), dense(activation="os.system")], "os.system is not one of torch.nn's"),
        ([pooling("mean"), dense(activation="torch.hub.load")], "torch.hub.load is not one of torch.nn's"),
        ([pooling("mean"), dense(activation="torch.nn.modules.linear.Linear")], "A module cannot be loaded"),
        ([pooling("mean"), WITHOUT_A_SIZE], "A module cannot be loaded: .*in_features"),
        ([pooling("mean"), dense(2 * HIDDEN)], "first batch"),
        (
            [pooling("mean"), Module(type=NEW_NORMALIZE, config={"module_input_name": "token_embeddings"})],
            "Normalize works on 'token_embeddings'",
        ),
    ],
)
def test_a_module_that_cannot_be_loaded_is_an_error(tmp_path: Path, modules: list[Module], said: str):
    path = write_family(tmp_path / "model", "bert", modules=modules)
    refuse(path, said)


NOT_WEIGHTS = b"version https://git-lfs.github.com/spec/v1\n"


@pytest.mark.parametrize("weights_file", ["model.safetensors", "pytorch_model.bin"])
def test_a_head_whose_weights_are_missing_or_broken_is_an_error(tmp_path: Path, weights_file: str):
    path = write_family(tmp_path / "model", "bert", modules=[pooling("mean"), dense(weights_file=weights_file)])
    (path / "2_Dense" / weights_file).write_bytes(NOT_WEIGHTS)
    refuse(path, rf"2_Dense/{weights_file} cannot be read")
    (path / "2_Dense" / weights_file).unlink()
    refuse(path, "2_Dense holds no weights")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (without("linear.bias"), r"A module cannot be loaded: (.|\n)*linear\.bias"),
        (
            lambda weights: weights["linear.weight"].fill_(float("nan")),
            r"linear\.weight in .*2_Dense has numbers that are not finite",
        ),
    ],
)
def test_a_weight_of_a_head_that_is_missing_or_not_finite_is_named(tmp_path: Path, edit: Any, said: str):
    path = write_family(tmp_path / "model", "bert", modules=[pooling("mean"), dense()])
    edit_weights(path / "2_Dense" / "model.safetensors", edit)
    refuse(path, said)


# -- the checkpoint ---------------------------------------------------------------------------------------


LOST = "encoder.layer.1.output.dense.weight"
NORM = "encoder.layer.0.output.LayerNorm.weight"


def take_weights_of_another_family(path: Path) -> None:
    other = write_family(path.parents[1] / "other", "distilbert")
    path.write_bytes((other / "model.safetensors").read_bytes())


def spoil(number: float) -> Callable[[Path], None]:
    return lambda path: edit_weights(path, lambda weights: weights[LOST][3, 5].fill_(number))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (Path.unlink, "holds no weights"),
        (lambda path: path.write_bytes(NOT_WEIGHTS), "transformers cannot load"),
        # transformers would fill them with random numbers
        (lambda path: edit_weights(path, without(LOST)), f"lacks 1 weights, {LOST}"),
        (take_weights_of_another_family, "The checkpoint lacks"),
        (spoil(float("nan")), rf"{LOST} in .* not finite"),
        (spoil(float("inf")), rf"{LOST} in .* not finite"),
        (
            lambda path: edit_weights(path, lambda weights: weights[NORM].fill_(3e38)),
            r"infinities or NaN from encoder\.layer\.0\.output\.LayerNorm on",
        ),
    ],
)
def test_weights_that_are_missing_broken_or_not_finite_are_an_error(bert: Path, damage: Any, said: str):
    damage(bert / "model.safetensors")
    refuse(bert, said)


@pytest.mark.parametrize("config", [{"intermediate_size": 40}, {"model_type": "telepathy"}])
def test_a_config_of_another_model_than_the_weights_is_an_error(bert: Path, config: dict[str, object]):
    edit_json(bert / "config.json", lambda written: written.update(config))
    refuse(bert, "transformers cannot load")


@pytest.mark.parametrize("name", ["BartModel", "BartForSequenceClassification"])
def test_an_encoder_decoder_is_an_error(tmp_path: Path, name: str):
    config = transformers.BartConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    getattr(transformers, name)(config).save_pretrained(tmp_path)
    refuse(tmp_path, "bart is an encoder–decoder")


async def test_the_pooler_of_transformers_may_be_missing(bert: Path):
    before = await ServedModel(bert).embed(TEXTS)
    edit_weights(bert / "model.safetensors", without("pooler."))
    assert largest_difference(await ServedModel(bert).embed(TEXTS), before) == 0


async def test_a_checkpoint_with_a_language_model_head_loads_as_its_encoder(bert: Path):
    config = transformers.AutoConfig.from_pretrained(bert)
    transformers.BertForMaskedLM(config).save_pretrained(bert)
    rows = await ServedModel(bert).embed(TEXTS)
    assert largest_difference(rows, reference(bert).encode(list(TEXTS))) < 1e-5


# -- padding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad_token_id", [None, -1, "last"])
async def test_any_padding_token_will_do(bert: Path, pad_token_id: object):
    """Some configs name none, or −1, or one that was added at the vocabulary's end."""

    def set_pad(config: dict[str, object]) -> None:
        last = int(str(config["vocab_size"])) - 1
        config["pad_token_id"] = last if pad_token_id == "last" else pad_token_id

    expected = reference(bert).encode(list(TEXTS))
    edit_json(bert / "config.json", set_pad)
    assert largest_difference(await ServedModel(bert).embed(TEXTS), expected) < 1e-5


# -- what is loaded is told -----------------------------------------------------------------------------


def test_the_description_names_all_pooling_types(bert: Path):
    write_modules(bert, [legacy_pooling("cls_token", "mean_tokens")])
    assert "cls+mean pooling, 64 dimensions, 48 tokens" in load(bert).describe()


def test_batches_of_a_processor_are_small(bert: Path):
    assert load(bert).default_batch_tokens == 2048


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "int8", "backend": "auto"}, "--dtype int8: OpenVINO is not used for models that read images"),
        ({"backend": "openvino"}, "--backend openvino: OpenVINO is not used for models that read images"),
        ({"backend": "compile"}, "--backend compile: models that read images cannot be compiled"),
    ],
)
def test_settings_that_a_model_cannot_have_are_refused_before_others_are_converted(
    settings: dict, said: str, tmp_path: Path
):
    folder = read_model_folder(clip(tmp_path / "clip"))
    with pytest.raises(ModelLoadError, match=re.escape(said)):
        load_transformer(folder, ModelConfig(device="cpu", **settings), Offload())  # without ``prepare``


def test_weights_of_eight_bits_are_not_looked_at():
    require_finite([("weight", torch.zeros(4).to(torch.float8_e4m3fn))], Path("model"))
