"""A classifier or judge that cannot be computed as its files say is refused, with what and why."""

from pathlib import Path

import pytest
import transformers

from tests.models.classifier_families import cross_encoder, reranker_tokenizer, write_classifier
from tests.models.model_families import ServedModel, edit_json, edit_weights, refuse, without, write_model
from tests.models.test_reranking_agreement import FLAT, PLAIN_CHAT, write_process_reward, write_reranker


@pytest.mark.parametrize(
    ("name", "head", "lost"),
    [
        ("bert", "SequenceClassification", "classifier"),
        ("bert", "SequenceClassification", "bert.pooler"),
        ("roberta", "SequenceClassification", "classifier"),
        ("qwen3", "SequenceClassification", "score"),
        ("bert", "TokenClassification", "classifier"),
    ],
)
def test_a_head_that_was_never_trained_is_refused(name: str, head: str, lost: str, tmp_path: Path):
    """transformers would fill it with random numbers."""
    path = write_classifier(tmp_path / "model", name, head)
    edit_weights(path / "model.safetensors", without(lost))
    refuse(path, f"lacks [124] weights, {lost}")


def test_labels_that_the_head_does_not_have_are_refused(tmp_path: Path):
    path = write_classifier(tmp_path / "model", "bert", num_labels=2)
    edit_json(path / "config.json", lambda config: config.update(id2label={"0": "a", "1": "b", "2": "c"}))
    refuse(path, "transformers cannot load")


@pytest.mark.parametrize("activation", ["torch.nn.Linear", "torch.nn.init.zeros_", "torch.nn.Wish"])
def test_what_is_no_activation_is_refused(activation: str, tmp_path: Path):
    path = write_classifier(tmp_path / "model", "bert", num_labels=1)
    edit_json(path / "config.json", lambda c: c.update(sbert_ce_default_activation_function=activation))
    refuse(path, f"{activation} is not|activation function {activation} is not")


def test_classifiers_that_read_the_padding_are_refused(tmp_path: Path):
    config = transformers.XLNetConfig(vocab_size=50, d_model=16, n_layer=1, n_head=2, d_inner=16)
    transformers.XLNetForSequenceClassification(config).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda document: document.update(max_position_embeddings=64))
    refuse(tmp_path, "xlnet's classifier needs padding on the left")


# -- language models that judge -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (PLAIN_CHAT, "it leaves out the query and the document"),
        (FLAT.replace("'document'", "'query'"), "it leaves out the document"),
        ("{{ raise_exception('only users speak') }}", "it fails with only users speak"),
        ("", "there is none"),
    ],
)
def test_a_template_that_cannot_carry_a_pair_is_refused(template: str, said: str, tmp_path: Path):
    path = write_reranker(tmp_path / "model", template=FLAT)
    cross_encoder(path).save_pretrained(str(path))
    (path / "chat_template.jinja").unlink()
    if template:
        (path / "chat_template.jinja").write_text(template)
    refuse(path, f"cannot carry a query and a document: {said}")


def test_a_model_that_scales_its_logits_is_refused(tmp_path: Path):
    path = write_model(tmp_path / "model", "GraniteForCausalLM", reranker_tokenizer(), logits_scaling=8.0)
    refuse(path, "granite transforms its logits", task="score")
    edit_json(path / "config.json", lambda config: config.update(logits_scaling=1.0))
    ServedModel(path, settings={"task": "score"})


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "Gemma2ForCausalLM"])
def test_rounding_is_not_taken_for_scaling(name: str, tmp_path: Path):
    path = write_reranker(tmp_path / "model", name)
    ServedModel(path, dtype="bfloat16", settings={"task": "score"})


def test_words_that_the_model_cannot_say_are_refused(tmp_path: Path):
    path = write_reranker(tmp_path / "model", template=FLAT)
    cross_encoder(path).save_pretrained(str(path))
    edit_json(path / "1_LogitScore" / "config.json", lambda config: config.update(true_token_id=100_000))
    refuse(path, "Token 100000 is outside")


def test_a_judge_without_its_language_head_is_refused(tmp_path: Path):
    path = write_reranker(tmp_path / "model", tie_word_embeddings=False)
    edit_weights(path / "model.safetensors", without("lm_head"))
    refuse(path, "lacks 1 weights, lm_head", task="score")


@pytest.mark.parametrize("lost", ["score.2", "score."])
def test_a_step_judge_without_its_head_is_refused(lost: str, tmp_path: Path):
    path = write_process_reward(tmp_path / "prm")
    edit_weights(path / "model.safetensors", without(lost))
    refuse(path, "The head's weights do not fit")


def test_a_judge_is_told_of_in_its_description(tmp_path: Path):
    path = write_reranker(tmp_path / "model")
    described = ServedModel(path, settings={"task": "score"}).runner.describe()
    assert "scores from the logits of 2 tokens, 400 tokens" in described
    described = ServedModel(write_classifier(tmp_path / "bert", "bert", num_labels=3)).runner.describe()
    assert "3 labels for each input" in described
