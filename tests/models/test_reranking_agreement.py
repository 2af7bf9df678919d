"""Language models that judge pairs and steps give what their authors' formulas give."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from tests.kept_folders import built_once
from tests.lanes import sampled
from tests.model_folders import write_json
from tests.models.classifier_families import LONG, PAIRS, PROMPTS, cross_encoder, reranker_tokenizer
from tests.models.model_families import TEXTS, ServedModel, edit_json, largest_difference, write_model
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.generative_reranker import JUDGE, RerankerTemplate
from trio_pool_serve.prompts import TextPrompt
from trio_pool_serve.types import Classify, TokenClassify

TOLERANCE = 1e-4
RAW, SCORE = Classify("raw"), Classify("score")
LANGUAGE_MODELS = (
    "Qwen3ForCausalLM",
    "Qwen2ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Gemma2ForCausalLM",
)

FLAT = (
    "{% set i = messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | default('judge') %}"
    "<|im_start|>{{ i }}: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }} / "
    "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|im_end|>so yes or no:"
)
STRUCTURED = (
    "{% for m in messages %}<|im_start|>{% if m.role in ('query', 'document', 'system') %}{{ m.role }} "
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_end|>answer{% endif %}"
)
PLAIN_CHAT = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"


def family_of(name: str) -> str:
    return name.removesuffix("ForCausalLM").lower()


def rows(scores: Any) -> Any:
    return np.asarray(scores).reshape(len(scores), -1)


@built_once
def write_reranker(folder: Path, name: str = "Qwen3ForCausalLM", template: str | None = None, **config: Any) -> Path:
    return write_model(folder, name, reranker_tokenizer(template), **config)


async def difference(path: Path, pairs: Any, expected: Any, params: Classify = SCORE, **options: Any) -> float:
    """Of scores computed together and of scores computed alone, the larger."""
    rendering = options.pop("rendering", {})
    ours = ServedModel(path, settings=options)
    assert ours.folder.spec.tasks == {"score"}
    assert ours.folder.spec.scoring == "pairs"
    return max(
        [
            largest_difference(await ours.compute(pairs, params, together=together, **rendering), rows(expected))
            for together in (True, False)
        ]
    )


# -- sentence-transformers' form ------------------------------------------------------------------------


@sampled("name", LANGUAGE_MODELS, keep=LANGUAGE_MODELS[:2])
@pytest.mark.parametrize("template", [FLAT, STRUCTURED, None], ids=["flat", "structured", "none"])
@pytest.mark.parametrize("max_length", [40, LONG])
async def test_a_cross_encoder_with_a_logit_score_agrees(
    name: str, template: str | None, max_length: int, tmp_path: Path, record_agreement: Callable[..., None]
):
    path = write_reranker(tmp_path / "model", name, template)
    theirs = cross_encoder(path, max_length=max_length)
    theirs.save_pretrained(str(tmp_path / "saved"))
    found = await difference(tmp_path / "saved", PROMPTS, theirs.predict(PAIRS))
    assert found < TOLERANCE
    record_agreement(f"{family_of(name)} with a logit score", "score", "CrossEncoder", found)
    raw = theirs.predict(PAIRS, activation_fn=nn.Identity(), prompt="find the same")
    rendering = {"instruction": "find the same"}
    assert await difference(tmp_path / "saved", PROMPTS, raw, RAW, rendering=rendering) < 10 * TOLERANCE
    assert max_length < LONG or len(set(np.round(raw, 3))) >= len(PAIRS) - 1, "agreement would prove nothing"


async def test_a_bare_folder_whose_template_names_both_roles_agrees(tmp_path: Path):
    path = write_reranker(tmp_path / "model", template=FLAT)
    assert await difference(path, PROMPTS, cross_encoder(path).predict(PAIRS)) < TOLERANCE


async def test_options_of_the_template_agree(tmp_path: Path):
    path = write_reranker(tmp_path / "model", template=STRUCTURED)
    cross_encoder(path, max_length=40).save_pretrained(str(path))
    options = {"chat_template": {"add_generation_prompt": True}}
    edit_json(path / "sentence_bert_config.json", lambda config: config.update(processing_kwargs=options))
    edit_json(path / "config_sentence_transformers.json", lambda c: c.update(activation_fn="torch.nn.Identity"))
    assert await difference(path, PROMPTS, cross_encoder(path).predict(PAIRS)) < 10 * TOLERANCE


async def test_the_logit_of_yes_alone_agrees(tmp_path: Path):
    path = write_reranker(tmp_path / "model", template=FLAT)
    cross_encoder(path).save_pretrained(str(path))
    edit_json(path / "1_LogitScore" / "config.json", lambda config: config.update(false_token_id=None))
    assert await difference(path, PROMPTS, cross_encoder(path).predict(PAIRS)) < TOLERANCE


@pytest.mark.parametrize("template", [FLAT, STRUCTURED, PLAIN_CHAT])
async def test_a_decoder_classifier_reads_pairs_in_its_template_if_that_has_a_place_for_both(
    template: str, tmp_path: Path
):
    tokenizer = reranker_tokenizer(template)
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    tokenizer.model_max_length = 48
    config = {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id}
    path = write_model(tmp_path / "model", "Qwen3ForSequenceClassification", tokenizer, **config)
    ours = ServedModel(path)
    theirs = cross_encoder(path)
    if template == PLAIN_CHAT:  # a chat model's own: sentence-transformers would refuse it
        theirs[0].modality_config.pop("message")
    assert largest_difference(await ours.compute(PROMPTS, SCORE), rows(theirs.predict(PAIRS))) < TOLERANCE


# -- Qwen3-Reranker's own form ------------------------------------------------------------------------


def by_the_model_card(path: Path, pairs: Sequence[tuple[str, str]], instruction: str, max_length: int) -> list[float]:
    """As https://huggingface.co/Qwen/Qwen3-Reranker-0.6B computes it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    judge = RerankerTemplate()
    prefix = tokenizer.encode(judge.prefix, add_special_tokens=False)
    suffix = tokenizer.encode(judge.suffix, add_special_tokens=False)
    texts = [f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}" for query, document in pairs]
    room = max_length - len(prefix) - len(suffix)
    inputs = tokenizer(texts, padding=False, truncation="longest_first", max_length=room, return_attention_mask=False)
    for index, ids in enumerate(inputs["input_ids"]):
        inputs["input_ids"][index] = prefix + ids + suffix
    inputs = tokenizer.pad(inputs, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits[:, -1, :]
    yes, no = (logits[:, tokenizer.convert_tokens_to_ids(word)] for word in ("yes", "no"))
    return torch.stack([no, yes], dim=1).log_softmax(dim=1)[:, 1].exp().tolist()


QUESTION = "Given a web search query, retrieve relevant passages that answer the query"


CARD = f"""---
library_name: transformers
pipeline_tag: text-ranking
---
prefix = "<|im_start|>system\\n{JUDGE} Note that the answer can only be \\"yes\\" or \\"no\\".<|im_end|>"
"""
"""The lines of Qwen3-Reranker's README.md by which it is recognised."""


@pytest.mark.parametrize("settings", [{"task": "score"}, {}], ids=["flag", "card"])
@pytest.mark.parametrize("tied", [True, False])
@sampled("max_length", [LONG, 320], keep=[320])
async def test_a_language_model_asked_for_yes_or_no_agrees(
    settings: dict[str, Any], max_length: int, tmp_path: Path, record_agreement: Callable[..., None], *, tied: bool
):
    path = write_reranker(tmp_path / "model", template=PLAIN_CHAT, tie_word_embeddings=tied)
    if not settings:
        (path / "README.md").write_text(CARD)
    edit_json(path / "tokenizer_config.json", lambda config: config.update(model_max_length=max_length))
    expected = by_the_model_card(path, PAIRS, QUESTION, max_length)
    found = await difference(path, PROMPTS, expected, **settings)
    assert found < TOLERANCE
    record_agreement("qwen3 asked for yes or no", "score", "formula of the model card", found)
    assert max_length < LONG or len(set(np.round(expected, 5))) > len(PAIRS) // 2, "agreement would prove nothing"
    other = by_the_model_card(path, PAIRS, "Find the same", max_length)
    rendering = {"instruction": "Find the same"}
    assert await difference(path, PROMPTS, other, **settings, rendering=rendering) < TOLERANCE


def test_a_prompt_that_is_assumed_is_said_and_a_name_is_not_enough(tmp_path: Path):
    path = write_reranker(tmp_path / "Qwen3-Reranker-0.6B", template=PLAIN_CHAT)
    spec = read_model_folder(path).spec
    assert spec.tasks == {"embed", "token_embed"}
    assert spec.no_score.endswith(
        "set --task embed to score by its vectors. If it is Qwen3-Reranker, set --task score."
    )
    by_flag = ModelConfig(task="score")
    assert read_model_folder(path, by_flag).spec.assumption.startswith(
        "The folder declares no prompt for pairs and is "
    )
    (path / "README.md").write_text(CARD)
    assert read_model_folder(path).spec.assumption.startswith("README.md is Qwen3-Reranker's model card: pairs are ")
    assert read_model_folder(path, by_flag).spec.assumption == ""
    (path / "README.md").write_bytes(b"\xff" + CARD.encode())
    assert read_model_folder(path).spec.tasks == {"embed", "token_embed"}


# -- steps ------------------------------------------------------------------------------------------------


SOLUTIONS = [f"{text[:60]}<extra_0>{text[60:120]}<extra_0>" for text in TEXTS] + ["no step at all"]


def write_process_reward(path: Path, *, sharded: bool = False) -> Path:
    """As Qwen2.5-Math-PRM-7B is published: a language model's weights, and a head beside them."""
    write_model(path, "Qwen2ForCausalLM", reranker_tokenizer())
    weights = load_file(path / "model.safetensors")
    random = torch.Generator().manual_seed(3)
    for name, shape in {"0.weight": (32, 32), "0.bias": (32,), "2.weight": (2, 32), "2.bias": (2,)}.items():
        weights[f"score.{name}"] = torch.randn(shape, generator=random)
    (path / "model.safetensors").unlink()
    if sharded:
        names = list(weights)
        shards = {"a": {name: weights[name] for name in names[::2]}, "b": {name: weights[name] for name in names[1::2]}}
        for shard, part in shards.items():
            save_file(part, path / f"model-{shard}.safetensors", metadata={"format": "pt"})
        files = {name: f"model-{shard}.safetensors" for shard, part in shards.items() for name in part}
        write_json(path / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})
    else:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    remote = {
        "AutoConfig": "configuration_qwen2_rm.Qwen2RMConfig",
        "AutoModel": "modeling_qwen2_rm.Qwen2ForProcessRewardModel",
    }
    edit_json(
        path / "config.json",
        lambda config: config.update(architectures=["Qwen2ForProcessRewardModel"], auto_map=remote),
    )
    return path


async def steps_differ(ours: ServedModel, logits: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """How far the model's numbers of each step are from the softmax of an input's logits at its steps."""
    assert ours.folder.spec.tasks == {"token_classify"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(ours.path)
    step = tokenizer.convert_tokens_to_ids("<extra_0>")
    with torch.no_grad():
        every_ids = [tokenizer(text, return_tensors="pt")["input_ids"] for text in SOLUTIONS]
        expected = [logits(ids).softmax(dim=-1)[ids[0] == step] for ids in every_ids]
    largest = 0.0
    for together in (True, False):
        found = await ours.compute([TextPrompt(text) for text in SOLUTIONS], TokenClassify(), together=together)
        assert [row.shape for row in found] == [tuple(row.shape) for row in expected]
        assert sorted({len(row) for row in found}) == [0, 2]
        largest = max(
            largest, *(float(np.abs(a - b.numpy()).max(initial=0)) for a, b in zip(found, expected, strict=True))
        )
    return largest


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("trust_remote_code", [True, False])
async def test_a_process_reward_model_agrees(
    tmp_path: Path, record_agreement: Callable[..., None], *, sharded: bool, trust_remote_code: bool
):
    path = write_process_reward(tmp_path / "prm", sharded=sharded)
    ours = ServedModel(path, settings={"trust_remote_code": trust_remote_code})
    model = transformers.Qwen2Model.from_pretrained(path).eval()
    head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    weights: dict[str, Any] = {}
    for file in path.glob("*.safetensors"):
        weights |= load_file(file)
    head.load_state_dict({name[6:]: weight for name, weight in weights.items() if name.startswith("score.")})
    difference = await steps_differ(ours, lambda ids: head(model(ids).last_hidden_state[0]))
    assert difference < TOLERANCE
    record_agreement("qwen2 process reward model", "token_classify", "formula of the model card", difference)


@pytest.mark.parametrize("name", ["MistralForCausalLM", "Gemma2ForCausalLM"])
async def test_a_language_model_that_judges_steps_agrees(
    name: str, tmp_path: Path, record_agreement: Callable[..., None]
):
    """As Math-Shepherd's model card computes it."""
    path = write_reranker(tmp_path / "model", name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    step, *words = tokenizer.convert_tokens_to_ids(["<extra_0>", "yes", "no"])
    ours = ServedModel(path, settings={"pooler_config": json.dumps({"step_tag_id": step, "returned_token_ids": words})})
    difference = await steps_differ(ours, lambda ids: model(ids).logits[0][:, words])
    assert difference < TOLERANCE
    record_agreement(f"{family_of(name)} judge of steps", "token_classify", "formula of the model card", difference)
