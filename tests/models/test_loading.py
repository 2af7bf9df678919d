"""What cannot be loaded as asked is an error that a person can act on, never skipped or made up."""

import json
import re
from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve

from tests.models.classifier_families import cross_encoder, reranker_tokenizer, write_classifier
from tests.models.model_families import (
    DENSE,
    HIDDEN,
    TEXTS,
    Module,
    ServedModel,
    dense,
    edit_json,
    edit_weights,
    largest_difference,
    layer_norm,
    layer_weights,
    legacy_pooling,
    load,
    pooling,
    reference,
    refuse,
    without,
    write_family,
    write_model,
    write_modules,
)
from tests.models.retrieval_families import (
    colbert_v2,
    colbert_without_metadata,
    inference_free,
    opensearch,
    pylate_bert,
    splade_max,
    write_bge_m3,
)
from tests.models.test_reranking_agreement import FLAT, PLAIN_CHAT, write_process_reward, write_reranker
from tests.models.vision_families import clip
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.checkpoint import require_finite
from trio_pool_serve.models.loading.runner_loader import load_transformer
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Embed, MaxSim, SparseEmbed, SparseLookup, TokenEmbed


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A folder of its own, to be spoilt."""
    return write_family(tmp_path / "bert", "bert")


def after_mean(*modules: Module) -> list[Module]:
    return [pooling("mean"), *modules]


MODELS = "sentence_transformers.models"
OF_HUGE_SIZE = evolve(dense(), config={"in_features": 10**6, "out_features": 10**6})
"""Would take 4 TB."""

WITHOUT_A_SIZE = Module(type=DENSE, config={"out_features": 4}, weights={"linear.weight": torch.zeros(4, HIDDEN)})


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        *(
            ([evolve(layer_weights(*given), config=layer_weights(*given).config | config), pooling("mean")], said)
            for given, config, said in (
                ((1, 2), {"layer_start": 2}, r"layer_weights \[2\], layer_start 2 and num_hidden_layers 2; acc"),
                ((1, 2), {"layer_start": -1, "num_hidden_layers": 0}, "layer_start -1"),
                ((1, 2), {"layer_start": "1"}, "layer_start '1'"),
                ((1, 2), {"num_hidden_layers": None}, "num_hidden_layers None"),
            )
        ),
        ([evolve(layer_weights(), weights={"x": torch.ones(1)}), pooling("mean")], "has no layer_weights"),
        ([layer_weights(0, 1), pooling("mean")], "first batch: there are 2 layer_weights, but 3 hidden states"),
        (after_mean(Module(type=f"{MODELS}.LayerNorm", config={"dimension": HIDDEN})), "2_LayerNorm contains no"),
        (after_mean(layer_norm(HIDDEN - 1)), "first batch"),
        (after_mean(evolve(layer_norm(), config={"dimension": 10**10})), "size mismatch for weight"),
        (after_mean(Module(type="custom_st.Head")), "custom_st.Head is not one of sentence-transformers' own"),
        ([pooling("median")], "Pooling requires median"),
        ([pooling(["mean", "median"])], "accepted: cls, max, mean"),
        *(
            (after_mean(dense(activation=activation)), f"{activation} is not a module of torch.nn")
            for activation in ("torch.nn.modules.activation.Wish", "os.system", "torch.hub.load")
        ),
        (after_mean(dense(activation="torch.nn.modules.linear.Linear")), "A module cannot be loaded"),
        (after_mean(WITHOUT_A_SIZE), "A module cannot be loaded: .*in_features"),
        (after_mean(OF_HUGE_SIZE), "size mismatch for linear.weight"),
        (after_mean(dense(2 * HIDDEN)), "first batch"),
    ],
)  # fmt: skip
def test_a_module_that_cannot_be_loaded_is_an_error(tmp_path: Path, modules: list[Module], said: str):
    path = write_family(tmp_path / "model", "bert", modules=modules)
    edit_json(path / "config.json", lambda config: config.update(output_hidden_states=True))
    refuse(path, said)


OF_CODE = {"auto_map": {"AutoModelForSequenceClassification": "someone/code--modeling.Model"}}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model_type": "telepathy"}, r"config\.json: model_type is telepathy, which transformers does not have\.$"),
        ({"model_type": "telepathy", **OF_CODE}, "not have: it is code of .* only with --trust-remote-code"),
        (
            {"model_type": None, **OF_CODE},
            r"model_type is missing, and auto_map is .*modeling\.Model.*: it is code of .* only with --trust-remote",
        ),
        ({"model_type": "vit", **OF_CODE}, "vit models read no text"),
        (
            {"model_type": "t5", "architectures": ["T5ForSequenceClassification"]},
            r"config\.json: architectures is .*T5ForSequenceClassification.*decoder; accepted .*T5EncoderModel",
        ),
    ],
)
def test_a_class_of_other_code_is_refused_and_nobody_is_asked_to_run_it(
    tmp_path: Path, changed: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
):
    path = write_classifier(tmp_path / "classifier", "bert")
    edit_json(path / "config.json", lambda config: config.update(changed))
    refuse(path, said)
    assert "[y/N]" not in capsys.readouterr().out


NOT_WEIGHTS = b"version https://git-lfs.github.com/spec/v1\n"


@pytest.mark.parametrize("weights_file", ["model.safetensors", "pytorch_model.bin"])
def test_a_head_whose_weights_are_missing_or_broken_is_an_error(tmp_path: Path, weights_file: str):
    path = write_family(tmp_path / "model", "bert", modules=after_mean(dense(weights_file=weights_file)))
    (path / "2_Dense" / weights_file).write_bytes(NOT_WEIGHTS)
    refuse(path, rf"2_Dense/{weights_file} cannot be read")
    (path / "2_Dense" / weights_file).unlink()
    refuse(path, "2_Dense contains no weights")


# -- weights and settings of each kind --------------------------------------------------------------------------

WEIGHTS, TABLE = "model.safetensors", "query_0_SparseStaticEmbedding/pytorch_model.bin"
OF_DENSE = f"2_Dense/{WEIGHTS}"
LOST, NORM = "encoder.layer.1.output.dense.weight", "encoder.layer.0.output.LayerNorm.weight"
HEAD = "cls.predictions.transform.dense.weight"
UNTIED = {"tie_word_embeddings": False}
SCORE = {"task": "score"}


def classifier(name: str = "bert", head: str = "SequenceClassification", **config: Any) -> Callable[[Path], Path]:
    return lambda path: write_classifier(path, name, head, **config)


def write_bert(path: Path) -> Path:
    return write_family(path, "bert")


def with_dense(path: Path) -> Path:
    return write_family(path, "bert", modules=after_mean(dense()))


def saved_reranker(path: Path) -> Path:
    cross_encoder(write_reranker(path, template=FLAT)).save_pretrained(str(path))
    return path


def edited(edit: Callable[[Any], object]) -> Callable[[Path], None]:
    """Return what edits the JSON or the weights of a file."""
    return lambda path: (edit_json if path.suffix == ".json" else edit_weights)(path, edit)


def lacking(prefix: str) -> Callable[[Path], None]:
    return edited(without(prefix))


def fill(name: str, number: float) -> Callable[[Path], None]:
    return edited(lambda weights: weights[name].fill_(number))


def changed(**changes: Any) -> Callable[[Path], None]:
    return edited(lambda document: document.update(changes))


def of_another_family(path: Path) -> None:
    other = write_family(path.parents[1] / "other", "distilbert")
    path.write_bytes((other / WEIGHTS).read_bytes())


def template(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None if text else path.unlink()


UNFIT = [
    (write_bert, WEIGHTS, Path.unlink, "contains no weights"),
    (
        write_bert,
        WEIGHTS,
        lambda path: path.write_bytes(NOT_WEIGHTS),
        r"cannot be read: .*\. It is damaged, or an incomplete",
    ),
    # transformers would fill them with random numbers
    (write_bert, WEIGHTS, lacking(LOST), f"lacks 1 weights, {LOST}"),
    (write_bert, WEIGHTS, of_another_family, "The checkpoint lacks"),
    *((write_bert, WEIGHTS, fill(LOST, number), rf"{LOST} in .* infinities or NaN") for number in (nan, inf)),
    (write_bert, WEIGHTS, fill(NORM, 3e38), r"infinities or NaN from encoder\.layer\.0\.output\.LayerNorm on"),
    *(
        (write_bert, "config.json", changed(**config), "transformers cannot load")
        for config in ({"intermediate_size": 40}, {"hidden_act": "telepathy"})
    ),
    (with_dense, OF_DENSE, lacking("linear.bias"), r"cannot be loaded: (.|\n)*linear\.bias"),
    (with_dense, OF_DENSE, fill("linear.weight", nan), r"linear\.weight in .*2_Dense contains infinities or NaN"),
    *(
        (classifier(name, head), WEIGHTS, lacking(lost), f"lacks [124] weights, {lost}")
        for name, head, lost in (
            ("bert", "SequenceClassification", "classifier"),
            ("bert", "SequenceClassification", "bert.pooler"),
            ("roberta", "SequenceClassification", "classifier"),
            ("qwen3", "SequenceClassification", "score"),
            ("bert", "TokenClassification", "classifier"),
        )
    ),
    (classifier(num_labels=2), "config.json", changed(id2label={"0": "a", "1": "b", "2": "c"}), "ers cannot load"),
    *(
        (
            classifier(num_labels=1),
            "config.json",
            changed(sbert_ce_default_activation_function=activation),
            f"{activation} is not|activation function {activation} is not",
        )
        for activation in ("torch.nn.Linear", "torch.nn.init.zeros_", "torch.nn.Wish")
    ),
    *(
        (saved_reranker, "chat_template.jinja", template(text), f"cannot carry a query and a document: {said}")
        for text, said in (
            (PLAIN_CHAT, "it leaves out the query and the document"),
            (FLAT.replace("'document'", "'query'"), "it leaves out the document"),
            ("{{ raise_exception('only users speak') }}", "it fails with only users speak"),
            ("", "there is none"),
        )
    ),
    (saved_reranker, "1_LogitScore/config.json", changed(true_token_id=100_000), "Token 100000 is outside"),
    (lambda path: write_reranker(path, **UNTIED), WEIGHTS, lacking("lm_head"), "lacks 1 weights, lm_head", SCORE),
    *(
        (write_process_reward, WEIGHTS, lacking(lost), "The head's weights do not fit")
        for lost in ("score.2", "score.")
    ),
    (colbert_v2, WEIGHTS, lacking("linear.weight"), "no linear.weight, the projection of a ColBERT"),
    (colbert_without_metadata, "pytorch_model.bin", lacking("linear.weight"), "no linear.weight, the projection"),
    (colbert_v2, WEIGHTS, changed(**{"linear.weight": torch.ones(4, 5)}), "cannot compute its fi"),
    (pylate_bert, "1_Dense/config.json", changed(out_features=7), "module cannot be loaded"),
    (splade_max, WEIGHTS, lacking(HEAD), f"lacks 1 weights, {HEAD}"),
    (opensearch, TABLE, edited(lambda found: found.update(idf=found.pop("weight"))), "contains no tensor named weight"),
    (opensearch, TABLE, changed(weight=torch.ones(9999)), "9999 weights for a vocabulary of"),
    *(
        (write_bge_m3, name, lambda path: path.write_bytes(b"no weights"), f"{name} cannot be loaded")
        for name in ("sparse_linear.pt", "colbert_linear.pt")
    ),
]


@pytest.mark.parametrize("row", UNFIT, ids=[row[3][:40] for row in UNFIT])
def test_files_that_are_missing_broken_or_do_not_fit_are_named(row: Any, tmp_path: Path):
    write, name, edit, said, *settings = row
    edit(write(tmp_path / "model") / name)
    refuse(tmp_path / "model", said, **(settings[0] if settings else {}))


@pytest.mark.parametrize("max_model_len", [None, 512, 10**7])
@pytest.mark.parametrize(
    ("model_type", "name", "said"),
    [
        ("telepathy", "TelepathyModel", "model_type is telepathy, which transformers does not have"),
        (
            "telepathy",
            "TelepathyForSequenceClassification",
            "model_type is telepathy, which transformers does not have",
        ),
        ("bart", "BartModel", "bart is an encoder–decoder"),
        ("bart", "BartForSequenceClassification", "bart is an encoder–decoder"),
        ("whisper", "WhisperForConditionalGeneration", "whisper is an encoder–decoder"),
        ("vit", "ViTModel", "vit models read no text"),
    ],
)
def test_an_architecture_is_refused_before_lengths_a_tokenizer_and_weights_are_missed(
    tmp_path: Path, model_type: str, name: str, said: str, max_model_len: int | None
):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "architectures": [name]}))
    refuse(tmp_path, said, max_model_len=max_model_len)


def test_classifiers_that_read_the_padding_are_refused(tmp_path: Path):
    config = transformers.XLNetConfig(vocab_size=50, d_model=16, n_layer=1, n_head=2, d_inner=16)
    transformers.XLNetForSequenceClassification(config).save_pretrained(tmp_path)
    changed(max_position_embeddings=64)(tmp_path / "config.json")
    refuse(tmp_path, "xlnet's classifier needs padding on the left")


def test_a_model_that_scales_its_logits_is_refused(tmp_path: Path):
    path = write_model(tmp_path / "model", "GraniteForCausalLM", reranker_tokenizer(FLAT), logits_scaling=8.0)
    refuse(path, "granite transforms its logits")
    changed(logits_scaling=1.0)(path / "config.json")
    ServedModel(path)


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "Gemma2ForCausalLM"])
def test_rounding_is_not_taken_for_scaling(name: str, tmp_path: Path):
    served = ServedModel(write_reranker(tmp_path / "model", name, FLAT), dtype="bfloat16")
    assert "scores from the logits of 2 tokens, 400 tokens" in str(served.runner.facts)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "int8", "backend": "auto"}, "--dtype int8: OpenVINO is not used for models that read images"),
        ({"backend": "openvino"}, "--backend openvino: OpenVINO is not used for models that read images"),
    ],
)
def test_settings_that_a_model_cannot_have_are_refused_before_others_are_converted(
    settings: dict, said: str, tmp_path: Path
):
    folder = read_model_folder(clip(tmp_path / "clip"))
    with pytest.raises(ModelLoadError, match=re.escape(said)):
        load_transformer(folder, ModelConfig(device="cpu", **settings), Offload())  # without preparing it


def test_weights_of_eight_bits_are_not_looked_at():
    require_finite([("weight", torch.zeros(4).to(torch.float8_e4m3fn))], Path("model"))


# -- what can be loaded -----------------------------------------------------------------------------------------


async def test_the_pooler_of_transformers_may_be_missing(bert: Path):
    before = await ServedModel(bert).embed(TEXTS)
    edit_weights(bert / WEIGHTS, without("pooler."))
    assert largest_difference(await ServedModel(bert).embed(TEXTS), before) == 0


async def test_a_checkpoint_with_a_language_model_head_loads_as_its_encoder(bert: Path):
    config = transformers.AutoConfig.from_pretrained(bert)
    transformers.BertForMaskedLM(config).save_pretrained(bert)
    rows = await ServedModel(bert).embed(TEXTS)
    assert largest_difference(rows, reference(bert).encode(list(TEXTS))) < 1e-5


@pytest.mark.parametrize("pad_token_id", [None, -1, "last"])
async def test_any_padding_token_will_do(bert: Path, pad_token_id: object):
    """Some configs name none, or −1, or one that was added at the vocabulary's end."""
    last = transformers.AutoConfig.from_pretrained(bert).vocab_size - 1
    expected = reference(bert).encode(list(TEXTS))
    changed(pad_token_id=last if pad_token_id == "last" else pad_token_id)(bert / "config.json")
    assert largest_difference(await ServedModel(bert).embed(TEXTS), expected) < 1e-5


def test_the_description_names_all_pooling_types_and_labels(bert: Path, tmp_path: Path):
    write_modules(bert, [legacy_pooling("cls_token", "mean_tokens")])
    assert "cls+mean pooling, 64 dimensions, 48 tokens" in str(load(bert).facts)
    assert "3 labels for each input" in str(load(write_classifier(tmp_path / "model", "bert", num_labels=3)).facts)


def test_each_kind_has_the_heads_that_it_can_be_asked_for(tmp_path: Path):
    assert set(load(pylate_bert(tmp_path / "late")).loaded.heads) == {TokenEmbed, MaxSim}
    assert set(load(splade_max(tmp_path / "splade")).loaded.heads) == {SparseEmbed}
    assert set(load(inference_free(tmp_path / "free")).loaded.heads) == {SparseEmbed, SparseLookup}
    assert set(load(write_bge_m3(tmp_path / "bge")).loaded.heads) == {Embed, SparseEmbed, TokenEmbed}


def test_batches_of_a_vocabulary_s_width_are_smaller(tmp_path: Path):
    path, wide = splade_max(tmp_path / "splade"), 200_000
    assert load(path).facts.max_batch_tokens == 2048
    changed(vocab_size=wide)(path / "config.json")
    vocabulary = {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias", "cls.predictions.decoder.bias"}

    def widen(weights: dict[str, torch.Tensor]) -> None:
        for name in vocabulary & set(weights):
            old = weights[name]
            weights[name] = torch.zeros(wide, *old.shape[1:])
            weights[name][: len(old)] = old

    edit_weights(path / WEIGHTS, widen)
    assert load(path, dtype="float32").facts.max_batch_tokens == 2**30 // (4 * wide) == 1342
