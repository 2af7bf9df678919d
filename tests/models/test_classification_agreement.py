"""Classifiers give what transformers and sentence-transformers give, whatever batch an input rides in."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.models.classifier_families import (
    DECODERS,
    ENCODERS,
    FAMILIES,
    LONG,
    PAIRS,
    POOLED,
    PROMPTS,
    cross_encoder,
    write_classifier,
)
from tests.models.model_families import TEXTS, ServedModel, edit_json, largest_difference
from tests.models.test_reranking_agreement import FLAT
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.prompts import PairPrompt, TextPrompt
from trio_pool_serve.types import Batch, Classify, TokenClassify

TOLERANCE = 1e-4
TEXT_PROMPTS = [TextPrompt(text) for text in TEXTS]
RAW, SCORE = Classify("raw"), Classify("score")


def rows(scores: Any) -> Any:
    return np.asarray(scores).reshape(len(scores), -1)


def pipeline(path: Path, task: str, **options: Any) -> Any:
    return transformers.pipeline(task, str(path), device="cpu", **options)


def probabilities(path: Path, texts: list[Any], names: list[str]) -> Any:
    found = pipeline(path, "text-classification", top_k=None)(texts, truncation=True)
    return np.array([[next(x["score"] for x in row if x["label"] == name) for name in names] for row in found])


NAMES = ["no", "perhaps", "yes"]
LABELS = {"id2label": dict(enumerate(NAMES)), "label2id": {name: index for index, name in enumerate(NAMES)}}


@pytest.mark.parametrize("name", FAMILIES)
async def test_labels_agree_for_texts_and_pairs(name: str, tmp_path: Path):
    path = write_classifier(tmp_path / name, name, **LABELS)
    ours = ServedModel(path)
    assert ours.folder.spec.labels == tuple(NAMES)
    tokenwise = set() if name in ("distilbert", "deberta-v2") else {"token_classify"}
    assert ours.folder.spec.tasks == {"classify"} | tokenwise
    expected = probabilities(path, list(TEXTS), NAMES)
    for together in (True, False):
        assert largest_difference(await ours.compute(TEXT_PROMPTS, Classify(), together=together), expected) < TOLERANCE
    pairs = [pair for pair in PAIRS if pair[1]]  # the pipeline takes an empty second text for none
    of_pairs = probabilities(path, [{"text": first, "text_pair": second} for first, second in pairs], NAMES)
    found = await ours.compute([PairPrompt(*pair) for pair in pairs], Classify())
    assert largest_difference(found, of_pairs) < TOLERANCE
    assert largest_difference(await ours.compute(PROMPTS, SCORE), cross_encoder(path).predict(PAIRS)) < 10 * TOLERANCE


@pytest.mark.parametrize(
    ("labels", "problem_type"),
    [
        (1, None),
        (3, None),
        (1, "regression"),
        (3, "regression"),
        (3, "single_label_classification"),
        (1, "multi_label_classification"),
        (3, "multi_label_classification"),
    ],
)
async def test_probabilities_follow_the_problem_type(labels: int, problem_type: str | None, tmp_path: Path):
    path = write_classifier(tmp_path / "bert", "bert", num_labels=labels, problem_type=problem_type)
    ours = ServedModel(path)
    expected = probabilities(path, list(TEXTS), list(ours.folder.spec.labels))
    assert largest_difference(await ours.compute(TEXT_PROMPTS, Classify()), expected) < TOLERANCE


IDENTITY = "torch.nn.modules.linear.Identity"
TANH = "torch.nn.modules.activation.Tanh"


@pytest.mark.parametrize(
    ("labels", "config", "texts"),
    [
        (1, {"sentence_transformers": {"activation_fn": IDENTITY, "version": "4.1.0"}}, {}),
        (1, {"sbert_ce_default_activation_function": IDENTITY}, {}),
        (1, {"sbert_ce_default_activation_function": IDENTITY, "sentence_transformers": {"activation_fn": TANH}}, {}),
        (3, {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, {}),
        (1, {"sentence_transformers": {"activation_fn": IDENTITY}}, {"activation_fn": TANH}),
        (1, {}, {"activation_fn": IDENTITY}),
        (3, {}, {}),
    ],
)
async def test_scores_follow_the_activation_of_the_files(labels: int, config: Any, texts: Any, tmp_path: Path):
    path = write_classifier(tmp_path / "bert", "bert", num_labels=labels)
    if texts:
        cross_encoder(path).save_pretrained(str(path))
        edit_json(path / "config_sentence_transformers.json", lambda document: document.update(texts))
    edit_json(path / "config.json", lambda document: document.update(config))
    scores = await ServedModel(path).compute(PROMPTS, SCORE)
    assert largest_difference(scores, rows(cross_encoder(path).predict(PAIRS))) < TOLERANCE


@pytest.mark.parametrize("name", ["bert", "qwen3"])
async def test_a_cross_encoder_saved_with_modules_agrees(name: str, tmp_path: Path):
    path = write_classifier(tmp_path / name, name, num_labels=1)
    theirs = cross_encoder(path, max_length=24)
    theirs.save_pretrained(str(tmp_path / "saved"))
    ours = ServedModel(tmp_path / "saved")
    assert ours.folder.spec.scoring == "pairs"
    assert largest_difference(await ours.compute(PROMPTS, SCORE), rows(theirs.predict(PAIRS))) < TOLERANCE


@pytest.mark.parametrize("chat_template", [None, FLAT])
async def test_a_cross_encoder_of_modules_agrees_as_saved_with_its_chat_template(
    chat_template: str | None, tmp_path: Path
):
    path = POOLED["qwen3_with_pooled_scores"](tmp_path / "written")
    if chat_template is not None:
        states = {"method": "forward", "method_output_name": "last_hidden_state"}
        conversations = {
            "modality_config": {"text": states, "message": {**states, "format": "flat"}},
            "module_output_name": "token_embeddings",
            "max_seq_length": LONG,
        }
        edit_json(path / "tokenizer_config.json", lambda file: file.update(chat_template=chat_template))
        edit_json(path / "sentence_bert_config.json", lambda file: file.update(conversations))
    theirs = cross_encoder(path)
    theirs.save_pretrained(str(tmp_path / "saved"))
    ours = ServedModel(tmp_path / "saved")
    assert (ours.folder.spec.chat is None) == (chat_template is None)
    for instruction in ("", "find: "):
        expected = rows(theirs.predict(PAIRS, prompt=instruction or None))
        found = await ours.compute(PROMPTS, SCORE, instruction)
        assert largest_difference(found, expected) < TOLERANCE / 10


@pytest.mark.parametrize("name", POOLED)
async def test_all_activations_of_labels_that_modules_compute_are_in_one_row(name: str, tmp_path: Path):
    """Labels have softmax, one score has a sigmoid; the same in a batch with rows of one activation."""
    path = POOLED[name](tmp_path / name)
    ours, theirs = ServedModel(path), cross_encoder(path)
    raw = rows(theirs.predict(PAIRS, activation_fn=torch.nn.Identity()))
    likely = torch.from_numpy(raw).softmax(-1) if raw.shape[1] > 1 else torch.from_numpy(raw).sigmoid()
    expected = [(likely[row].numpy(), *[raw[row]] * (row % 2)) for row in range(len(raw))]
    wanted = [(Classify(), *[RAW] * (row % 2)) for row in range(len(raw))]
    found = await ours.runner.launch(Batch(tuple(await ours.requests(PROMPTS, wanted))))
    for row, other in zip(found, expected, strict=True):
        assert largest_difference(row, other) < TOLERANCE / 10
    assert ours.folder.spec.labels == tuple(f"LABEL_{index}" for index in range(raw.shape[1]))


async def test_labels_of_modules_have_the_names_of_the_config_if_it_has_as_many(tmp_path: Path):
    path = POOLED["bert_with_pooled_labels"](tmp_path / "model")
    edit_json(path / "config.json", lambda config: config.update(LABELS))
    assert read_model_folder(path).spec.labels == tuple(NAMES)


@pytest.mark.parametrize("name", DECODERS)
async def test_a_decoder_reads_the_last_token_whatever_the_padding_token_is(name: str, tmp_path: Path):
    """A text may hold the padding token itself; Qwen's ends in it."""
    path = write_classifier(tmp_path / name, name, num_labels=1)
    expected = await ServedModel(path).compute(PROMPTS, RAW)
    edit_json(path / "config.json", lambda config: config.update(pad_token_id=None))
    assert largest_difference(await ServedModel(path).compute(PROMPTS, RAW), expected) < TOLERANCE


@pytest.mark.parametrize("name", ENCODERS)
async def test_tokens_agree(name: str, tmp_path: Path):
    path = write_classifier(tmp_path / name, name, "TokenClassification", **LABELS)
    ours = ServedModel(path)
    assert (ours.folder.spec.tasks, ours.folder.spec.labels) == ({"token_classify"}, tuple(NAMES))
    model = transformers.AutoModelForTokenClassification.from_pretrained(path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    for activation in ("probabilities", "raw"):
        for together in (True, False):
            found = await ours.compute(TEXT_PROMPTS, TokenClassify(activation), together=together)
            for text, row in zip(TEXTS, found, strict=True):
                with torch.no_grad():
                    logits = model(**tokenizer(text, truncation=True, return_tensors="pt")).logits[0]
                expected = logits.softmax(-1) if activation == "probabilities" else logits
                assert row.shape == expected.shape
                assert np.abs(row - expected.numpy()).max() < TOLERANCE


def logits_of_tokens(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Each token's state through the layers that vLLM applies to it."""
    states = model.base_model(input_ids=ids).last_hidden_state
    if hasattr(model, "score"):
        return model.score(states)[0]
    if hasattr(model.classifier, "out_proj"):  # made for the first state of a row
        return torch.cat([model.classifier(states[:, at : at + 1]) for at in range(states.shape[1])])
    return model.classifier(states)[0]


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta", "modernbert", "qwen3", "llama"])
async def test_each_token_has_a_sequence_classifier_s_labels(name: str, tmp_path: Path):
    path = write_classifier(tmp_path / name, name, **LABELS)
    ours = ServedModel(path)
    assert ours.folder.spec.tasks == {"classify", "token_classify"}
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    raw = await ours.compute(TEXT_PROMPTS, TokenClassify("raw"))
    likely = await ours.compute(TEXT_PROMPTS, TokenClassify())
    requests = await ours.requests(TEXTS)
    with torch.no_grad():
        rows = [torch.from_numpy(request.prompt.token_ids.astype(np.int64)) for request in requests]
        expected = [logits_of_tokens(model, row.unsqueeze(0)) for row in rows]
    assert largest_difference(raw, [logits.numpy() for logits in expected]) < TOLERANCE / 10
    assert largest_difference(likely, [logits.softmax(-1).numpy() for logits in expected]) < TOLERANCE / 10
