"""Each embedding family's answers are those of sentence-transformers, by every route that gives them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from tests.end_to_end.folder_over_http import WHOLE, Record, farthest, of_words, one_of, serving_folder
from tests.models.model_families import LOADED_BY_ORACLE, TEXTS, UNMASKED, edit_json, reference, write_family
from tests.models.retrieval_families import DOCUMENTS, QUERIES, assert_same_ranking
from trio_pool_serve.types import Vectors

TOLERANCE = 1e-5
SCORE_TOLERANCE = 1e-4
ORACLE = "SentenceTransformer"
PROMPTS = {"query": "query: ", "document": "passage: "}


def write(folder: Path, name: str, *, as_published: bool = True, **settings: Any) -> Path:
    """Write a family's model with a prompt for each side of a search."""
    path = write_family(folder / name, name, as_published=as_published)
    edit_json(path / "config_sentence_transformers.json", lambda config: config.update(prompts=PROMPTS, **settings))
    return path


def oracle(folder: Path, name: str, **settings: Any) -> Any:
    """sentence-transformers on the same weights, with the config.json of transformers' class."""
    return reference(write(folder / "oracle", name, as_published=False, **settings))


@pytest.mark.parametrize("name", one_of(LOADED_BY_ORACLE, "bert"))
async def test_vectors_agree(name: str, tmp_path: Path, record_agreement: Record):
    path = write(tmp_path, name)
    theirs = oracle(tmp_path, name)
    expected = theirs.encode(list(TEXTS))
    words = of_words(TEXTS)
    one_by_one = [theirs.encode(text, output_value="token_embeddings").numpy() for text in TEXTS]
    of_unit_length = [tokens / np.linalg.norm(tokens, axis=-1, keepdims=True) for tokens in one_by_one]
    async with serving_folder(path) as ours:
        differences = [
            farthest(await ours.embeddings(TEXTS, **WHOLE), expected),
            farthest(await ours.embeddings(TEXTS[1:2], **WHOLE), expected[1:2]),
            farthest(await ours.embeddings(TEXTS[3:4], **WHOLE), expected[3:4]),
            farthest(await ours.embeddings(TEXTS, input_type="query"), theirs.encode_query(list(TEXTS))),
            farthest(await ours.embeddings(TEXTS, input_type="document"), theirs.encode_document(list(TEXTS))),
            farthest(await ours.pooled(TEXTS, task="embed"), expected),
            farthest(await ours.post("/embed", inputs=words, normalize=False), _without_unit_length(theirs, words)),
            farthest(await ours.post("/embed", inputs=words), theirs.encode(words, normalize_embeddings=True)),
        ]
        of_tokens = [
            farthest(await ours.pooled(TEXTS, task="token_embed", use_activation=False), one_by_one),
            farthest(await ours.pooled(TEXTS, task="token_embed", use_activation=True), of_unit_length),
            farthest(
                await ours.pooled(TEXTS, task="token_embed"), of_unit_length if _normalizes(theirs) else one_by_one
            ),
            farthest(await ours.post("/embed_all", inputs=words), of_words(TEXTS, one_by_one)),
        ]
    assert max(differences) < TOLERANCE
    assert max(of_tokens) < TOLERANCE
    record_agreement(name, "embed", ORACLE, max(differences))
    record_agreement(name, "token_embed", ORACLE, max(of_tokens))


@pytest.mark.parametrize("name", one_of(UNMASKED, "convbert"))
async def test_a_vector_does_not_depend_on_the_texts_of_other_clients(name: str, tmp_path: Path):
    """The oracle encodes each text alone: by its batch its vectors would differ."""
    path = write_family(tmp_path / name, name)
    texts = [TEXTS[1][:end] for end in range(1, 99, 6)]
    theirs = reference(path)
    expected = [theirs.encode(text) for text in texts]
    differences: list[float] = []
    async with serving_folder(path) as ours, trio.open_nursery() as nursery:

        async def ask(text: str, vector: Vectors) -> None:
            differences.append(farthest(await ours.embeddings([text]), [vector]))

        for each in zip(texts * 4, expected * 4, strict=True):
            nursery.start_soon(ask, *each)
        differences.append(farthest(await ours.embeddings(texts), expected))
    assert len(differences) == 4 * len(texts) + 1
    assert max(differences) < TOLERANCE
    assert np.linalg.norm(theirs.encode(texts)[0] - expected[0]) > 100 * TOLERANCE, "agreement would prove nothing"


def _normalizes(theirs: Any) -> bool:
    return any(type(module).__name__ == "Normalize" for module in theirs)


def _without_unit_length(theirs: Any, texts: list[str]) -> Vectors:
    """What the modules in front of Normalize make of the texts."""
    features = theirs.preprocess(texts)
    for module in theirs:
        if type(module).__name__ != "Normalize":
            features = module(features)
    return features["sentence_embedding"].detach().numpy()


BY_SIMILARITY = [("roberta", similarity) for similarity in ("cosine", "dot", "euclidean", "manhattan")]
"""The vectors of this family are not of unit length."""


@pytest.mark.parametrize(
    ("name", "similarity"), [*one_of([(name, None) for name in LOADED_BY_ORACLE], ("bert", None)), *BY_SIMILARITY]
)
async def test_scores_agree(name: str, similarity: str | None, tmp_path: Path, record_agreement: Record):
    """Each query against all documents, by every route that compares texts."""
    settings = {} if similarity is None else {"similarity_fn_name": similarity}
    path, theirs = write(tmp_path, name, **settings), oracle(tmp_path, name, **settings)
    queries, documents = theirs.encode_query(list(QUERIES)), theirs.encode_document(list(DOCUMENTS))
    expected = theirs.similarity(queries, documents).numpy()
    alike = theirs.similarity(theirs.encode(list(QUERIES)), theirs.encode(list(DOCUMENTS))).numpy()
    async with serving_folder(path) as ours:
        found = await ours.scores_by_route(QUERIES, DOCUMENTS)
        paired = await ours.scores(QUERIES, DOCUMENTS[: len(QUERIES)])
        inputs = [{"source_sentence": query, "sentences": DOCUMENTS} for query in QUERIES]
        symmetric = [await ours.post("/similarity", inputs=each) for each in inputs]
    for rows in found.values():
        assert_same_ranking(np.stack(rows), expected)
    difference = max(
        *(farthest(rows, expected) for rows in found.values()),
        farthest([paired], [np.diag(expected)]),
        farthest(symmetric, alike),
    )
    assert difference < SCORE_TOLERANCE
    record_agreement(name, "score" if similarity is None else f"score by {similarity}", ORACLE, difference)
