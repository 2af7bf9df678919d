"""Which folders classify, judge pairs or judge steps, and what of their files is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.model_folders import write_json
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.classification import CrossEncoder, SequenceClassifier, TokenClassifier
from trio_pool_serve.models.embedding import Embedding
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.generative_reranker import GenerativeReranker, RerankerTemplate
from trio_pool_serve.models.process_reward import ProcessReward
from trio_pool_serve.rendering.chat.pair_templates import ChatFormat

pytestmark = pytest.mark.unit

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}
LOGIT_SCORE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
POOLING = "sentence_transformers.models.Pooling"
ROLES = "{{ messages | selectattr('role', 'eq', 'query') }}{{ messages | selectattr('role', 'eq', 'document') }}"
WORDS = {"yes": 3, "no": 4, "<|im_start|>": 5, "<|im_end|>": 6, "<extra_0>": 7}


def write_folder(path: Path, *architectures: str, **config: Any) -> Path:
    """A folder of JSON alone."""
    base = {"model_type": "bert", "vocab_size": 100, "max_position_embeddings": 64}
    write_json(path / "config.json", base | {"architectures": list(architectures)} | config)
    return path


def write_cross_encoder(path: Path, task: str, *behind: tuple[str, dict[str, Any]], **texts: Any) -> Path:
    entries = [TRANSFORMER]
    for index, (kind, config) in enumerate(behind, start=1):
        entries.append({"idx": index, "name": str(index), "path": f"{index}_Module", "type": kind})
        write_json(path / f"{index}_Module" / "config.json", config)
    write_json(path / "modules.json", entries)
    write_json(path / "sentence_bert_config.json", {"transformer_task": task})
    write_json(path / "config_sentence_transformers.json", {"model_type": "CrossEncoder"} | texts)
    return path


def architecture_of(path: Path, **settings: Any) -> Any:
    return read_model_folder(path, ModelConfig(**settings)).spec


# -- classifiers ------------------------------------------------------------------------------------------


def test_a_classifier_with_one_label_scores_pairs(tmp_path: Path):
    judge = architecture_of(write_folder(tmp_path, "BertForSequenceClassification", id2label={"0": "LABEL_0"}))
    assert isinstance(judge, CrossEncoder)
    assert judge.tasks == {"classify", "token_classify", "score"}
    assert (judge.scoring, judge.labels) == ("pairs", ("LABEL_0",))


def test_a_classifier_with_several_labels_does_not(tmp_path: Path):
    names = {str(index): f"n{index}" for index in reversed(range(12))}
    sorter = architecture_of(write_folder(tmp_path, "BertForSequenceClassification", id2label=names))
    assert type(sorter) is SequenceClassifier
    assert (sorter.tasks, sorter.scoring) == ({"classify", "token_classify"}, None)
    assert sorter.labels == tuple(f"n{index}" for index in range(12))


@pytest.mark.parametrize(
    ("model_type", "name", "able"),
    [
        ("bert", "Bert", True),
        ("roberta", "Roberta", True),
        ("xlm-roberta", "XLMRoberta", True),
        ("camembert", "Camembert", True),
        ("modernbert", "ModernBert", True),
        ("qwen3", "Qwen3", True),
        ("distilbert", "DistilBert", False),
        ("deberta-v2", "DebertaV2", False),
    ],
)
def test_some_families_classify_tokens_too(tmp_path: Path, model_type: str, name: str, *, able: bool):
    folder = write_folder(tmp_path, f"{name}ForSequenceClassification", model_type=model_type, num_labels=3)
    assert architecture_of(folder).tasks == {"classify", *(["token_classify"] if able else [])}


def test_labels_without_names_have_transformers_names(tmp_path: Path):
    assert architecture_of(write_folder(tmp_path, "BertForTokenClassification")).labels == ("LABEL_0", "LABEL_1")
    write_folder(tmp_path, "BertForTokenClassification", num_labels=3)
    assert architecture_of(tmp_path).labels[2] == "LABEL_2"


def test_a_token_classifier_is_one(tmp_path: Path):
    found = architecture_of(write_folder(tmp_path, "RobertaForTokenClassification"))
    assert isinstance(found, TokenClassifier)
    assert (found.tasks, found.scoring) == ({"token_classify"}, None)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, r"id2label of config\.json has the indices 0, 2"),
        ({"problem_type": "ranking"}, r"problem_type of config\.json is 'ranking'"),
        ({"sentence_transformers": {"activation_fn": "os.system"}}, r"os\.system is not one of torch\.nn's"),
    ],
)
def test_a_classifier_s_config_that_is_not_supported_is_refused(tmp_path: Path, config: Any, said: str):
    write_folder(tmp_path, "BertForSequenceClassification", **config)
    with pytest.raises(ModelLoadError, match=said):
        architecture_of(tmp_path)


def test_a_cross_encoder_with_modules_is_one_whatever_its_weights_were_saved_from(tmp_path: Path):
    write_folder(write_cross_encoder(tmp_path, "sequence-classification"), "SomeModel", num_labels=1)
    assert isinstance(architecture_of(tmp_path), CrossEncoder)


@pytest.mark.parametrize("task", ["sequence-classification", "feature-extraction", "any-to-any"])
def test_a_cross_encoder_with_other_modules_is_refused(tmp_path: Path, task: str):
    write_folder(write_cross_encoder(tmp_path, task, (POOLING, {})), "BertForSequenceClassification")
    with pytest.raises(ModelLoadError, match=f"does {task}, followed by Pooling"):
        architecture_of(tmp_path)


def test_modules_of_an_embedding_model_outweigh_what_its_weights_were_saved_from(tmp_path: Path):
    write_cross_encoder(write_folder(tmp_path, "BertForSequenceClassification"), "feature-extraction", (POOLING, {}))
    write_json(tmp_path / "config_sentence_transformers.json", {})
    assert isinstance(architecture_of(tmp_path), Embedding)


# -- what is pooled, and what is refused --------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["BertModel", "RoFormerModel", "BertForMaskedLM", "ElectraForPreTraining", "Qwen3ForCausalLM", "GPT2Model"]
)
def test_a_bare_transformer_is_pooled(tmp_path: Path, name: str):
    assert isinstance(architecture_of(write_folder(tmp_path, name)), Embedding)


@pytest.mark.parametrize(
    "name",
    ["BertForQuestionAnswering", "BertForMultipleChoice", "BertForNextSentencePrediction", "ViTForImageClassification",
     "Wav2Vec2ForCTC", "ColModernVBertForRetrieval", "Qwen2ForRewardModel"],
)  # fmt: skip
def test_a_model_for_something_else_is_refused(tmp_path: Path, name: str):
    with pytest.raises(ModelLoadError, match=f"{name} is (not an embedding model|an unsupported page retriever)"):
        architecture_of(write_folder(tmp_path, name))


def test_a_task_that_the_files_do_not_allow_is_refused(tmp_path: Path):
    write_folder(tmp_path, "BertModel")
    assert "embed" in architecture_of(tmp_path, task="embed").tasks
    with pytest.raises(ModelLoadError, match=r"--task classify: .* support only embed, score, token_embed"):
        architecture_of(tmp_path, task="classify")


# -- language models that judge -----------------------------------------------------------------------


def write_vocabulary(path: Path, words: dict[str, int], where: str = "tokenizer.json") -> None:
    documents = {
        "tokenizer.json": {"model": {"vocab": words}},
        "added": {"added_tokens": [{"id": number, "content": word} for word, number in words.items()]},
        "unigrams": {"model": {"vocab": [["?", 0], ["?", 0], ["?", 0], *([word, -1.0] for word in words)]}},
        "vocab.json": words,
        "added_tokens.json": words,
        "tokenizer_config.json": {
            "added_tokens_decoder": {str(number): {"content": word} for word, number in words.items()}
        },
    }
    write_json(path / (where if "." in where else "tokenizer.json"), documents[where])


@pytest.mark.parametrize(
    "where", ["tokenizer.json", "added", "unigrams", "vocab.json", "added_tokens.json", "tokenizer_config.json"]
)
def test_a_language_model_judges_when_it_is_asked_to(tmp_path: Path, where: str):
    write_vocabulary(write_folder(tmp_path, "Qwen3ForCausalLM"), WORDS, where)
    judge = architecture_of(tmp_path, task="score")
    assert judge == GenerativeReranker(
        true_token_id=3, false_token_id=4, score_activation="torch.nn.Sigmoid", template=RerankerTemplate()
    )
    assert (judge.tasks, judge.scoring) == ({"score"}, "pairs")
    assert isinstance(architecture_of(tmp_path), Embedding)


@pytest.mark.parametrize("word", ["yes", "no", "<|im_start|>", "<|im_end|>"])
def test_a_language_model_without_the_words_is_refused(tmp_path: Path, word: str):
    write_vocabulary(write_folder(tmp_path, "GemmaForCausalLM"), {k: v for k, v in WORDS.items() if k != word})
    with pytest.raises(ModelLoadError, match="vocabulary has no "):
        architecture_of(tmp_path, task="score")


@pytest.mark.parametrize(
    "where", ["chat_template.jinja", "tokenizer_config.json", "chat_template.json", "processor_config.json"]
)
def test_a_template_with_a_place_for_both_texts_makes_a_language_model_a_judge(tmp_path: Path, where: str):
    write_vocabulary(write_folder(tmp_path, "Qwen3ForCausalLM"), WORDS)
    if where in ("chat_template.json", "processor_config.json"):  # which come first
        (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content[0].text }}")
    (tmp_path / where).write_text(ROLES if where.endswith("jinja") else json.dumps({"chat_template": ROLES}))
    assert architecture_of(tmp_path).template == ChatFormat(structured=False, options={}, required=False)


def test_a_saved_judge_names_its_words_and_its_format(tmp_path: Path):
    write_folder(write_cross_encoder(tmp_path, "text-generation", (LOGIT_SCORE, {"true_token_id": 9})), "XForCausalLM")
    assert architecture_of(tmp_path) == GenerativeReranker(
        true_token_id=9, false_token_id=None, score_activation="torch.nn.Sigmoid", template=None
    )
    formats = {"message": {"method": "forward", "format": "structured"}}
    options = {"chat_template": {"add_generation_prompt": True}}
    document = {"transformer_task": "text-generation", "modality_config": formats, "processing_kwargs": options}
    write_json(tmp_path / "sentence_bert_config.json", document)
    assert architecture_of(tmp_path).template == ChatFormat(structured=True, options={"add_generation_prompt": True})


@pytest.mark.parametrize(
    ("behind", "said"),
    [
        ((), "needs a LogitScore module only, but has none"),
        (((POOLING, {}),), "but has \\['Pooling'\\]"),
        (((LOGIT_SCORE, {}),), "has no true_token_id"),
        (((LOGIT_SCORE, {"true_token_id": 1, "module_input_name": "logits"}),), "works on 'logits'"),
    ],
)
def test_a_saved_judge_that_says_too_little_is_refused(tmp_path: Path, behind: Any, said: str):
    write_folder(write_cross_encoder(tmp_path, "text-generation", *behind), "XForCausalLM")
    with pytest.raises(ModelLoadError, match=said):
        architecture_of(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"text": {"max_length": 3}}, "text"), ({"chat_template": {"truncation": False}}, "truncation")],
)
def test_processing_that_is_not_supported_is_refused(tmp_path: Path, options: Any, said: str):
    write_folder(write_cross_encoder(tmp_path, "sequence-classification"), "BertForSequenceClassification")
    document = {"transformer_task": "sequence-classification", "processing_kwargs": options}
    write_json(tmp_path / "sentence_bert_config.json", document)
    with pytest.raises(ModelLoadError, match=f"processing_kwargs requires {said}"):
        architecture_of(tmp_path)


# -- steps ------------------------------------------------------------------------------------------------


def pooler(**tokens: Any) -> dict[str, str]:
    return {"pooler_config": json.dumps(tokens)}


def test_a_process_reward_model_is_known_by_its_class_and_its_token(tmp_path: Path):
    write_vocabulary(write_folder(tmp_path, "Qwen2ForProcessRewardModel", num_labels=2), WORDS)
    assert architecture_of(tmp_path) == ProcessReward(step_token_id=7, labels=("LABEL_0", "LABEL_1"))
    assert architecture_of(tmp_path, **pooler(step_tag_id=11)).step_token_id == 11
    with pytest.raises(ModelLoadError, match="has a classifier"):
        architecture_of(tmp_path, **pooler(returned_token_ids=(1, 2)))


def test_a_process_reward_model_whose_steps_end_in_no_known_token_is_refused(tmp_path: Path):
    write_vocabulary(write_folder(tmp_path, "Qwen2ForProcessRewardModel"), {"yes": 3})
    with pytest.raises(ModelLoadError, match="by step_tag_id in --pooler-config"):
        architecture_of(tmp_path)


def test_settings_make_a_language_model_judge_steps(tmp_path: Path):
    write_folder(tmp_path, "MistralForCausalLM")
    judge = architecture_of(tmp_path, **pooler(step_tag_id=9, returned_token_ids=(3, 4)))
    assert judge == ProcessReward(step_token_id=9, returned_token_ids=(3, 4), labels=("3", "4"))
    assert judge.tasks == {"token_classify"}


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("MistralForCausalLM", {"step_tag_id": 9}, "needs both"),
        ("MistralForCausalLM", {"returned_token_ids": (3,)}, "needs both"),
        ("MistralForCausalLM", {"step_tag_id": 9, "returned_token_ids": (3, 100)}, "Token 100 is outside"),
        ("BertModel", {"step_tag_id": 9, "returned_token_ids": (3,)}, "require a causal language model"),
    ],
)
def test_settings_for_steps_that_do_not_fit_are_refused(tmp_path: Path, name: str, settings: Any, said: str):
    write_folder(tmp_path, name)
    with pytest.raises(ModelLoadError, match=said):
        architecture_of(tmp_path, **pooler(**settings))
