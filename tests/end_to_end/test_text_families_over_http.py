"""Classifiers, cross-encoders and models for retrieval give what their oracles give, by every route.

Language models that judge pairs and steps are compared with their oracles in ``tests/models``.
"""

from collections.abc import Sequence
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
from tests.models.classifier_families import ENCODERS, FAMILIES, PAIRS, POOLED, cross_encoder, write_classifier
from tests.models.model_families import TEXTS, reference
from tests.models.retrieval_families import (
    DOCUMENTS,
    LATE_INTERACTION,
    QUERIES,
    SPARSE,
    assert_same_ranking,
    relative_difference,
    write_bge_m3,
)
from tests.models.test_bge_m3_agreement import Expected, by_formula
from tests.models.test_classification_agreement import LABELS, NAMES, pipeline
from trio_pool_serve.types import Vectors

TOLERANCE = 1e-5
SCORE_TOLERANCE = 1e-4
"""Also of a classifier's numbers."""


# -- classifiers ----------------------------------------------------------------------------------------


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
    assert np.ptp(texts, axis=0).max() > 100 * SCORE_TOLERANCE, "agreement would prove nothing"
    assert max(differences) < SCORE_TOLERANCE
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
    assert max(differences) < SCORE_TOLERANCE
    record_agreement(name, "token_classify", "transformers model", max(differences))


# -- cross-encoders -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", one_of(FAMILIES, "bert", "qwen3"))
async def test_a_cross_encoder_agrees(name: str, tmp_path: Path, record_agreement: Record):
    path = write_classifier(tmp_path / name, name, num_labels=1)
    theirs, instruction = cross_encoder(path), "Find the same"
    questions = [query for query in QUERIES if query]  # nothing and nothing is no input without special tokens
    ranked = [(query, document) for query in questions for document in DOCUMENTS]
    shape = len(questions), len(DOCUMENTS)
    expected = theirs.predict(ranked).reshape(shape)
    instructed = theirs.predict(ranked, prompt=instruction).reshape(shape)
    logits = theirs.predict(ranked, activation_fn=nn.Identity()).reshape(shape)
    first, second = zip(*PAIRS, strict=True)
    assert np.ptp(theirs.predict(PAIRS)) > 100 * SCORE_TOLERANCE, "agreement would prove nothing"
    async with serving_folder(path) as ours:
        found = await ours.scores_by_route(questions, DOCUMENTS)
        told = [await ours.reranked(query, DOCUMENTS, instruction=instruction) for query in questions]
        differences = [
            farthest([await ours.scores(first, second)], [theirs.predict(PAIRS)]),
            farthest(
                [await ours.scores(first, second, use_activation=False)],
                [theirs.predict(PAIRS, activation_fn=nn.Identity())],
            ),
            farthest([await ours.reranked_as_tei(questions[0], DOCUMENTS, raw_scores=True)], logits[:1]),
            farthest(told, instructed),
            *(farthest(rows, expected) for rows in found.values()),
        ]
    for rows in found.values():
        assert_same_ranking(np.stack(rows), expected)
    assert max(differences) < SCORE_TOLERANCE
    record_agreement(f"{name} cross-encoder", "score", "CrossEncoder", max(differences))


async def test_a_cross_encoder_of_modules_agrees(tmp_path: Path, record_agreement: Record):
    name = "modernbert_with_pooled_scores"
    path = POOLED[name](tmp_path / name)
    expected = cross_encoder(path).predict([(QUERIES[0], document) for document in DOCUMENTS])
    async with serving_folder(path) as ours:
        difference = farthest([await ours.reranked(QUERIES[0], DOCUMENTS)], [expected])
    assert difference < TOLERANCE
    record_agreement(name, "score", "CrossEncoder", difference)


# -- late interaction -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", one_of(LATE_INTERACTION, "pylate_bert"))
async def test_late_interaction_agrees(name: str, tmp_path: Path, record_agreement: Record):
    from sentence_transformers import MultiVectorEncoder

    path = LATE_INTERACTION[name](tmp_path / name)
    theirs = MultiVectorEncoder(str(path), device="cpu", local_files_only=True)
    expected = [tokens.numpy() for tokens in theirs.encode(list(DOCUMENTS))]
    queries, documents = theirs.encode_query(list(QUERIES)), theirs.encode_document(list(DOCUMENTS))
    asked = [row.numpy() for row in queries]
    scores = theirs.similarity(queries, documents).numpy()
    async with serving_folder(path) as ours:
        vectors = [
            farthest(await ours.pooled(DOCUMENTS, task="token_embed"), expected),
            farthest(await ours.pooled(DOCUMENTS[1:2]), expected[1:2]),
            farthest(await ours.post("/embed_all", inputs=of_words(DOCUMENTS)), of_words(DOCUMENTS, expected)),
            farthest(await ours.pooled(DOCUMENTS, input_type="document"), [row.numpy() for row in documents]),
            farthest(await ours.pooled(QUERIES, input_type="query"), asked),
            farthest(
                await ours.post("/embed_all", inputs=of_words(QUERIES), prompt_name="query"), of_words(QUERIES, asked)
            ),
        ]
        found = await ours.scores_by_route(QUERIES, DOCUMENTS)
        paired = await ours.scores(QUERIES, DOCUMENTS[: len(QUERIES)])
    for rows in found.values():
        assert_same_ranking(np.stack(rows), scores)
    difference = max(
        *(farthest(rows, scores) for rows in found.values()),
        farthest([paired], [np.diag(scores)]),
    )
    assert max(vectors) < TOLERANCE
    assert difference < SCORE_TOLERANCE
    record_agreement(name, "token_embed", "MultiVectorEncoder", max(vectors))
    record_agreement(name, "score", "MultiVectorEncoder", difference)


async def test_an_instruction_stands_behind_the_marker_of_queries(tmp_path: Path):
    from sentence_transformers import MultiVectorEncoder

    path = LATE_INTERACTION["pylate_bert"](tmp_path / "model")
    theirs = MultiVectorEncoder(str(path), device="cpu", local_files_only=True)
    queries = theirs.encode_query([QUERIES[0]], prompt=theirs.prompts["query"] + "about tasks: ")
    expected = theirs.similarity(queries, theirs.encode_document(list(DOCUMENTS))).numpy()
    async with serving_folder(path) as ours:
        found = await ours.scores(QUERIES[0], DOCUMENTS, instruction="about tasks: ")
    assert farthest([found], expected) < SCORE_TOLERANCE


# -- sparse ---------------------------------------------------------------------------------------------


def spread(rows: Sequence[Sequence[dict[str, Any]]], width: int) -> Vectors:
    """Return the weights of each text, float32, shape (texts, width)."""
    weights = np.zeros((len(rows), width), dtype=np.float32)
    for text, row in enumerate(rows):
        indices = [item["index"] for item in row]
        assert indices == sorted(set(indices))
        weights[text, indices] = [item["value"] for item in row]
    return weights


@pytest.mark.parametrize("name", one_of(SPARSE, "splade_max", "inference_free"))
async def test_sparse_vectors_agree(name: str, tmp_path: Path, record_agreement: Record):
    """Together and alone, with a prompt if the model has one."""
    from sentence_transformers import SparseEncoder

    path = SPARSE[name](tmp_path / name)
    theirs = SparseEncoder(str(path), device="cpu", local_files_only=True)
    dense = {"convert_to_sparse_tensor": False}
    expected = theirs.encode(list(DOCUMENTS), **dense).numpy()
    asked: dict[str, tuple[Any, Vectors]] = {}
    async with serving_folder(path) as ours:
        found = await ours.post("/embed_sparse", inputs=of_words(DOCUMENTS))
        asked["/embed_sparse"] = found, np.stack(of_words(DOCUMENTS, expected))
        asked["/pooling"] = await ours.pooled(DOCUMENTS, task="sparse_embed"), expected
        asked["/pooling of one"] = await ours.pooled(DOCUMENTS[1:2]), expected[1:2]
        for side, texts, encode in (
            ("query", QUERIES, theirs.encode_query),
            ("document", DOCUMENTS, theirs.encode_document),
        ):
            wanted = encode(list(texts), **dense).numpy()
            by_name = await ours.post("/embed_sparse", inputs=of_words(texts), prompt_name=side)
            asked[f"/embed_sparse {side}"] = by_name, np.stack(of_words(texts, wanted))
            asked[f"/pooling {side}"] = await ours.pooled(texts, input_type=side), wanted
    assert expected.any()
    difference = max(relative_difference(spread(rows, wanted.shape[1]), wanted) for rows, wanted in asked.values())
    assert difference < TOLERANCE
    record_agreement(name, "sparse_embed", "SparseEncoder", difference)


# -- BGE-M3 ---------------------------------------------------------------------------------------------


async def test_bge_m3_agrees(tmp_path: Path, record_agreement: Record):
    path = write_bge_m3(tmp_path / "model")
    expected = by_formula(path, DOCUMENTS)
    async with serving_folder(path) as ours:
        together = await ours.pooled(DOCUMENTS, tasks=["embed", "sparse_embed", "token_embed"])
        reordered = await ours.pooled(DOCUMENTS[1:2], tasks=["token_embed", "embed", "sparse_embed"])
        dense = await ours.embeddings(DOCUMENTS, **WHOLE)
        weights = await ours.post("/embed_sparse", inputs=of_words(DOCUMENTS))
        tokens = await ours.post("/embed_all", inputs=of_words(DOCUMENTS))
        scores = [await ours.reranked(query, DOCUMENTS) for query in QUERIES]
    assert all(list(row) == ["embed", "sparse_embed", "token_embed"] for row in together)
    alone = [
        {"embed": vector, "sparse_embed": row, "token_embed": array}
        for vector, row, array in zip(of_words(DOCUMENTS, dense), weights, tokens, strict=True)
    ]
    wanted_alone = of_words(DOCUMENTS, expected)
    for rows, wanted in ((together, expected), (alone, wanted_alone), (reordered, expected[1:2])):
        for task, difference in differences_of_bge_m3(rows, wanted).items():
            assert difference < TOLERANCE
            record_agreement("bge-m3", task, "formulas of the paper", difference)
    empty = DOCUMENTS.index("")
    assert farthest([dense[empty]], [expected[empty].dense]) < TOLERANCE
    theirs = reference(path)
    similar = theirs.similarity(theirs.encode_query(list(QUERIES)), theirs.encode_document(list(DOCUMENTS))).numpy()
    assert_same_ranking(np.stack(scores), similar)
    difference = farthest(scores, similar)
    assert difference < SCORE_TOLERANCE
    record_agreement("bge-m3", "score", "SentenceTransformer", difference)


def differences_of_bge_m3(rows: Sequence[dict[str, Any]], expected: Sequence[Expected]) -> dict[str, float]:
    weights = [{item["index"]: item["value"] for item in row["sparse_embed"]} for row in rows]
    assert [sorted(found) for found in weights] == [sorted(wanted.weights) for wanted in expected]
    return {
        "embed": farthest([row["embed"] for row in rows], [wanted.dense for wanted in expected]),
        "sparse_embed": max(
            abs(value - wanted.weights[token])
            for found, wanted in zip(weights, expected, strict=True)
            for token, value in found.items()
        ),
        "token_embed": farthest([row["token_embed"] for row in rows], [wanted.tokens for wanted in expected]),
    }
