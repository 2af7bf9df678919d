"""Classifiers give what transformers gives, for texts, pairs and tokens, by every route."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from tests.end_to_end.folder_over_http import (
    WHOLE,
    AskedFolder,
    Record,
    farthest,
    in_order,
    of_words,
    one_of,
    serving_folder,
)
from tests.models.classifier_families import ENCODERS, FAMILIES, PAIRS, write_classifier
from tests.models.model_families import TEXTS
from tests.models.test_classification_agreement import LABELS, NAMES, pipeline
from tests.models.test_reranking_agreement import SOLUTIONS, write_process_reward, write_reranker
from trio_pool_serve.types import Vectors

TOLERANCE = 1e-4


def by_pipeline(path: Path, inputs: Sequence[Any], **how: Any) -> Vectors:
    """Return a number per label for each input, in the order of ``NAMES``."""
    found = pipeline(path, "text-classification", top_k=None)(list(inputs), truncation=True, **how)
    return np.array([[of_label(row)[name] for name in NAMES] for row in found])


def of_label(predictions: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {item["label"]: item["score"] for item in predictions}


async def classified(ours: AskedFolder, **fields: Any) -> Vectors:
    """``/classify``: float32, shape (texts, labels); each label must be that of the greatest number."""
    items = in_order((await ours.post("/classify", input=TEXTS, **WHOLE, **fields))["data"])
    assert all(item["label"] == NAMES[int(np.argmax(item["probs"]))] for item in items)
    return np.array([item["probs"] for item in items], dtype=np.float32)


async def predicted(ours: AskedFolder, inputs: Any, **fields: Any) -> Vectors:
    """``/predict``: a number per label for each input, in the order of ``NAMES``; the greatest must come first."""
    answer = await ours.post("/predict", inputs=inputs, **fields)
    rows = answer if isinstance(answer[0], list) else [answer]
    for row in rows:
        assert [item["score"] for item in row] == sorted((item["score"] for item in row), reverse=True)
    return np.array([[of_label(row)[name] for name in NAMES] for row in rows], dtype=np.float32)


@pytest.mark.parametrize("name", one_of(FAMILIES, "bert", "qwen3"))
async def test_labels_agree(name: str, tmp_path: Path, record_agreement: Record):
    path = write_classifier(tmp_path / name, name, **LABELS)
    pairs = [pair for pair in PAIRS if pair[1]]  # the pipeline takes an empty second text for none
    words = [[text] for text in of_words(TEXTS)]
    texts = by_pipeline(path, TEXTS)
    raw = by_pipeline(path, TEXTS, function_to_apply="none")
    of_pairs = by_pipeline(path, [{"text": first, "text_pair": second} for first, second in pairs])
    async with serving_folder(path) as ours:
        differences = [
            farthest(await classified(ours), texts),
            farthest(await classified(ours, use_activation=False), raw),
            farthest(await ours.pooled(TEXTS, task="classify"), texts),
            farthest(await predicted(ours, TEXTS[1]), texts[1:2]),
            farthest(await predicted(ours, [TEXTS[3]]), texts[3:4]),
            farthest(await predicted(ours, list(pairs[0])), of_pairs[:1]),
            farthest(
                await predicted(ours, [*words, *(list(pair) for pair in pairs)]), [*of_words(TEXTS, texts), *of_pairs]
            ),
            farthest(await predicted(ours, words, raw_scores=True), of_words(TEXTS, raw)),
        ]
    assert np.ptp(texts, axis=0).max() > 100 * TOLERANCE, "agreement would prove nothing"
    assert max(differences) < TOLERANCE
    record_agreement(name, "classify", "transformers pipeline", max(differences))


@pytest.mark.parametrize("name", one_of(ENCODERS, "bert"))
async def test_labels_of_tokens_agree(name: str, tmp_path: Path, record_agreement: Record):
    path = write_classifier(tmp_path / name, name, "TokenClassification", **LABELS)
    model = transformers.AutoModelForTokenClassification.from_pretrained(path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    with torch.no_grad():
        logits = [model(**tokenizer(text, truncation=True, return_tensors="pt")).logits[0] for text in TEXTS]
    probabilities = [row.softmax(dim=-1) for row in logits]
    async with serving_folder(path) as ours:
        differences = [
            farthest(await ours.pooled(TEXTS, task="token_classify"), probabilities),
            farthest(await ours.pooled(TEXTS[3:4]), probabilities[3:4]),
            farthest(await ours.pooled(TEXTS, task="token_classify", use_activation=False), logits),
        ]
    assert max(differences) < TOLERANCE
    record_agreement(name, "token_classify", "transformers model", max(differences))


# -- steps ----------------------------------------------------------------------------------------------


async def steps_difference(path: Path, expected: Sequence[torch.Tensor], **loading: Any) -> float:
    async with serving_folder(path, **loading) as ours:
        together = await ours.pooled(SOLUTIONS, task="token_classify")
        alone = [(await ours.pooled([text]))[0] for text in SOLUTIONS]
    assert sorted({len(row) for row in together}) == [0, 2]
    return max(farthest(together, expected), farthest(alone, expected))


@torch.no_grad()
def steps_by(judge: Callable[[torch.Tensor], torch.Tensor], path: Path) -> list[torch.Tensor]:
    """Judge each solution alone; keep what is said of the tokens that end a step."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    ids = [tokenizer(text, return_tensors="pt")["input_ids"] for text in SOLUTIONS]
    step = tokenizer.convert_tokens_to_ids("<extra_0>")
    return [judge(row).softmax(dim=-1)[row[0] == step] for row in ids]


async def test_a_process_reward_model_agrees(tmp_path: Path, record_agreement: Record):
    from safetensors.torch import load_file

    path = write_process_reward(tmp_path / "prm")
    model = transformers.Qwen2Model.from_pretrained(path).eval()
    head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    weights = load_file(path / "model.safetensors")
    head.load_state_dict({name[6:]: weight for name, weight in weights.items() if name.startswith("score.")})
    expected = steps_by(lambda ids: head(model(ids).last_hidden_state[0]), path)
    difference = await steps_difference(path, expected)
    assert difference < TOLERANCE
    record_agreement("qwen2 process reward model", "token_classify", "formula of the model card", difference)


@pytest.mark.parametrize("name", one_of(["MistralForCausalLM", "Gemma2ForCausalLM"], "MistralForCausalLM"))
async def test_a_language_model_that_judges_steps_agrees(name: str, tmp_path: Path, record_agreement: Record):
    path = write_reranker(tmp_path / "model", name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    step, *words = tokenizer.convert_tokens_to_ids(["<extra_0>", "yes", "no"])
    expected = steps_by(lambda ids: model(ids).logits[0][:, words], path)
    pooler = json.dumps({"step_tag_id": step, "returned_token_ids": words})
    difference = await steps_difference(path, expected, pooler_config=pooler)
    assert difference < TOLERANCE
    family = name.removesuffix("ForCausalLM").lower()
    record_agreement(f"{family} judge of steps", "token_classify", "formula of the model card", difference)
