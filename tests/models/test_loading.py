"""What cannot be loaded as asked is an error that a person can act on, never skipped or made up."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.model_families import (
    DENSE,
    HIDDEN,
    NEW_NORMALIZE,
    TEXTS,
    Module,
    ServedModel,
    dense,
    edit_json,
    largest_difference,
    legacy_pooling,
    load,
    pooling,
    reference,
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


def edit_weights(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(path)
    edit(weights)
    path.unlink()
    save_file(weights, path, metadata={"format": "pt"})


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
    with pytest.raises(ModelLoadError, match=said):
        load(path)


@pytest.mark.parametrize("weights_file", ["model.safetensors", "pytorch_model.bin"])
def test_a_head_without_its_weights_file_is_an_error(tmp_path: Path, weights_file: str):
    modules = [pooling("mean"), dense(weights_file=weights_file)]
    path = write_family(tmp_path / "model", "bert", modules=modules)
    (path / "2_Dense" / weights_file).unlink()
    with pytest.raises(ModelLoadError, match="2_Dense holds no weights"):
        load(path)


@pytest.mark.parametrize("weights_file", ["model.safetensors", "pytorch_model.bin"])
def test_a_head_with_a_broken_weights_file_is_an_error(tmp_path: Path, weights_file: str):
    modules = [pooling("mean"), dense(weights_file=weights_file)]
    path = write_family(tmp_path / "model", "bert", modules=modules)
    (path / "2_Dense" / weights_file).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelLoadError, match=rf"2_Dense/{weights_file} cannot be read"):
        load(path)


def test_a_head_that_lacks_a_weight_is_an_error(tmp_path: Path):
    path = write_family(tmp_path / "model", "bert", modules=[pooling("mean"), dense()])
    edit_weights(path / "2_Dense" / "model.safetensors", lambda weights: weights.pop("linear.bias"))
    with pytest.raises(ModelLoadError, match=r"A module cannot be loaded: (.|\n)*linear\.bias"):
        load(path)


# -- the checkpoint ---------------------------------------------------------------------------------------


def test_a_folder_without_weights_is_an_error(bert: Path):
    (bert / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="holds no weights"):
        load(bert)


def test_a_checkpoint_that_lacks_weights_is_an_error(bert: Path):
    """transformers would fill them with random numbers."""
    lost = "encoder.layer.1.output.dense.weight"
    edit_weights(bert / "model.safetensors", lambda weights: weights.pop(lost))
    with pytest.raises(ModelLoadError, match=f"lacks 1 weights, {lost}"):
        load(bert)


def test_a_checkpoint_of_another_architecture_is_an_error(bert: Path, tmp_path: Path):
    other = write_family(tmp_path / "other", "distilbert")
    (bert / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    with pytest.raises(ModelLoadError, match="The checkpoint lacks"):
        load(bert)


def test_a_checkpoint_of_another_size_is_an_error(bert: Path):
    edit_json(bert / "config.json", lambda config: config.update(intermediate_size=40))
    with pytest.raises(ModelLoadError, match="transformers cannot load"):
        load(bert)


def test_a_broken_checkpoint_is_an_error(bert: Path):
    (bert / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelLoadError, match="transformers cannot load"):
        load(bert)


def test_an_unknown_architecture_is_an_error(bert: Path):
    edit_json(bert / "config.json", lambda config: config.update(model_type="telepathy"))
    with pytest.raises(ModelLoadError, match="transformers cannot load"):
        load(bert)


def test_an_encoder_decoder_is_an_error(bert: Path):
    config = transformers.BartConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    transformers.BartModel(config).save_pretrained(bert)
    with pytest.raises(ModelLoadError, match="bart is an encoder–decoder"):
        load(bert)


async def test_the_pooler_of_transformers_may_be_missing(bert: Path):
    def drop_pooler(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if name.startswith("pooler.")]:
            del weights[name]

    before = await ServedModel(bert).embed(TEXTS)
    edit_weights(bert / "model.safetensors", drop_pooler)
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


# -- numbers that are not finite --------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_an_error_with_its_name(bert: Path, wrong: float):
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["encoder.layer.1.output.dense.weight"][3, 5] = wrong

    edit_weights(bert / "model.safetensors", spoil)
    with pytest.raises(ModelLoadError, match=r"encoder\.layer\.1\.output\.dense\.weight in .* not finite"):
        load(bert)


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


def test_a_weight_of_a_module_that_is_not_finite_is_an_error_with_its_name(tmp_path: Path):
    folder = write_family(tmp_path / "bert", "bert", modules=[pooling("mean"), dense()])
    edit_weights(folder / "2_Dense/model.safetensors", lambda weights: weights["linear.weight"].fill_(float("nan")))
    with pytest.raises(ModelLoadError, match=r"linear\.weight in .*2_Dense has numbers that are not finite"):
        load(folder)


def test_finite_weights_whose_output_is_not_are_an_error_with_the_first_module(bert: Path):
    edit_weights(
        bert / "model.safetensors", lambda weights: weights["encoder.layer.0.output.LayerNorm.weight"].fill_(3e38)
    )
    with pytest.raises(ModelLoadError, match=r"infinities or NaN from encoder\.layer\.0\.output\.LayerNorm on"):
        load(bert)
