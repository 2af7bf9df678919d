"""``token_classify`` of sequence classifiers: the classifier on each token's state, by transformers' own modules."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.models.classifier_families import write_classifier
from tests.models.model_families import TEXTS, ServedModel, largest_difference
from trio_pool_serve.prompts import TextPrompt
from trio_pool_serve.types import TokenClassify

TOLERANCE = 1e-5
NAMES = {0: "no", 1: "perhaps", 2: "yes"}
LABELS = {"id2label": NAMES, "label2id": {name: index for index, name in NAMES.items()}}


def logits_of_tokens(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Each token's state through the layers that vLLM applies to it."""
    states = model.base_model(input_ids=ids).last_hidden_state
    if hasattr(model, "score"):
        return model.score(states)[0]
    if hasattr(model.classifier, "out_proj"):  # made for the first state of a row
        return torch.cat([model.classifier(states[:, at : at + 1]) for at in range(states.shape[1])])
    return model.classifier(states)[0]


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta", "modernbert", "qwen3", "llama"])
async def test_each_token_has_the_classifier_s_labels(name: str, tmp_path: Path):
    path = write_classifier(tmp_path / name, name, **LABELS)
    ours = ServedModel(path)
    assert ours.folder.spec.tasks == {"classify", "token_classify"}
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    prompts = [TextPrompt(text) for text in TEXTS]
    raw = await ours.compute(prompts, TokenClassify("raw"))
    likely = await ours.compute(prompts, TokenClassify())
    requests = await ours.requests(TEXTS)
    with torch.no_grad():
        rows = [torch.from_numpy(request.prompt.token_ids.astype(np.int64)) for request in requests]
        expected = [logits_of_tokens(model, row.unsqueeze(0)) for row in rows]
    assert largest_difference(raw, [logits.numpy() for logits in expected]) < TOLERANCE
    assert largest_difference(likely, [logits.softmax(-1).numpy() for logits in expected]) < TOLERANCE


async def test_a_row_and_its_tokens_share_a_batch(tmp_path: Path):
    """A cross-encoder's score, its labels and its tokens' labels, by one loaded model."""
    ours = ServedModel(write_classifier(tmp_path / "one", "bert", num_labels=1))
    assert ours.folder.spec.tasks == {"classify", "token_classify", "score"}


def test_other_families_classify_whole_texts_only(tmp_path: Path):
    ours = ServedModel(write_classifier(tmp_path / "other", "distilbert", **LABELS))
    assert ours.folder.spec.tasks == {"classify"}
