"""Models that read pairs score and rank as their oracles do, by every route."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from tests.end_to_end.folder_over_http import Record, farthest, one_of, serving_folder
from tests.models.classifier_families import FAMILIES, LONG, PAIRS, cross_encoder, write_classifier
from tests.models.model_families import edit_json
from tests.models.retrieval_families import DOCUMENTS, QUERIES, assert_same_ranking
from tests.models.test_reranking_agreement import (
    FLAT,
    LANGUAGE_MODELS,
    PLAIN_CHAT,
    QUESTION,
    by_the_model_card,
    write_reranker,
)
from trio_pool_serve.types import Vectors

TOLERANCE = 1e-4
Oracle = Callable[[Sequence[tuple[str, str]]], Any]

QUESTIONS = [query for query in QUERIES if query]
"""Nothing and nothing is no input for a model without special tokens."""

FIRST, SECOND = [first for first, _ in PAIRS], [second for _, second in PAIRS]
INSTRUCTION = "Find the same"


async def difference(
    path: Path, oracle: Oracle, instructed: Oracle, raw: Oracle | None = None, **loading: Any
) -> float:
    """Ask for pairs one by one and for each query's ranking, by every route; ``raw`` is without an activation."""
    expected, with_instruction = ranked(oracle), ranked(instructed)
    async with serving_folder(path, **loading) as ours:
        found = await ours.scores_by_route(QUESTIONS, DOCUMENTS)
        told = [await ours.reranked(query, DOCUMENTS, instruction=INSTRUCTION) for query in QUESTIONS]
        differences = [
            farthest([await ours.scores(FIRST, SECOND)], [oracle(PAIRS)]),
            farthest([await ours.scores(FIRST, SECOND, instruction=INSTRUCTION)], [instructed(PAIRS)]),
            farthest(told, with_instruction),
            *(farthest(rows, expected) for rows in found.values()),
        ]
        if raw is not None:
            logits = [await ours.scores(FIRST, SECOND, use_activation=False)]
            differences.append(farthest(logits, [raw(PAIRS)]))
            as_tei = [await ours.reranked_as_tei(QUESTIONS[0], DOCUMENTS, raw_scores=True)]
            differences.append(farthest(as_tei, [raw([(QUESTIONS[0], document) for document in DOCUMENTS])]))
    for rows in found.values():
        assert_same_ranking(np.stack(rows), expected)
    assert_same_ranking(np.stack(told), with_instruction)
    return max(differences)


def ranked(oracle: Oracle) -> Vectors:
    """Return each query's score with each document, shape (queries, documents)."""
    return np.array([oracle([(query, document) for document in DOCUMENTS]) for query in QUESTIONS])


def oracles(theirs: Any) -> tuple[Oracle, Oracle, Oracle]:
    """Return a cross-encoder's scores, those with an instruction, and its logits."""
    return (
        theirs.predict,
        lambda pairs: theirs.predict(pairs, prompt=INSTRUCTION),
        lambda pairs: theirs.predict(pairs, activation_fn=nn.Identity()),
    )


@pytest.mark.parametrize("name", one_of(FAMILIES, "bert", "qwen3"))
async def test_a_cross_encoder_agrees(name: str, tmp_path: Path, record_agreement: Record):
    path = write_classifier(tmp_path / name, name, num_labels=1)
    theirs = cross_encoder(path)
    assert np.ptp(theirs.predict(PAIRS)) > 100 * TOLERANCE, "agreement would prove nothing"
    found = await difference(path, *oracles(theirs))
    assert found < TOLERANCE
    record_agreement(f"{name} cross-encoder", "score", "CrossEncoder", found)


@pytest.mark.parametrize("name", one_of(LANGUAGE_MODELS, "Qwen3ForCausalLM"))
async def test_a_cross_encoder_with_a_logit_score_agrees(name: str, tmp_path: Path, record_agreement: Record):
    theirs = cross_encoder(write_reranker(tmp_path / "model", name, FLAT), max_length=LONG)
    theirs.save_pretrained(str(tmp_path / "saved"))
    found = await difference(tmp_path / "saved", *oracles(theirs))
    assert found < TOLERANCE
    record_agreement(f"{family_of(name)} with a logit score", "score", "CrossEncoder", found)


@pytest.mark.parametrize("name", one_of(LANGUAGE_MODELS, "Qwen3ForCausalLM"))
async def test_a_language_model_asked_for_yes_or_no_agrees(name: str, tmp_path: Path, record_agreement: Record):
    path = write_reranker(tmp_path / "model", name, PLAIN_CHAT)
    edit_json(path / "tokenizer_config.json", lambda config: config.update(model_max_length=LONG))

    def by_question(question: str) -> Oracle:
        return lambda pairs: by_the_model_card(path, pairs, question, LONG)

    found = await difference(path, by_question(QUESTION), by_question(INSTRUCTION), task="score")
    assert found < TOLERANCE
    record_agreement(f"{family_of(name)} asked for yes or no", "score", "formula of the model card", found)


def family_of(name: str) -> str:
    return name.removesuffix("ForCausalLM").lower()
