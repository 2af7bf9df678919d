"""Each embedding family's answers are those of sentence-transformers, by every route that gives them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.end_to_end.folder_over_http import WHOLE, AskedFolder, farthest, serving_folder
from tests.runner.model_families import FAMILIES, MAX_LENGTH, TEXTS, edit_json, reference, write_family
from tests.runner.retrieval_families import DOCUMENTS, QUERIES, assert_same_ranking
from trio_pool_serve.types import Vectors

TOLERANCE = 1e-5
SCORE_TOLERANCE = 1e-4
ORACLE = "SentenceTransformer"
PROMPTS = {"query": "query: ", "document": "passage: "}
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")

Record = Callable[[str, str, str, float], None]


def write(folder: Path, name: str, **settings: Any) -> Path:
    """Write a family's model with a prompt for each side of a search."""
    path = write_family(folder / name, name)
    edit_json(path / "config_sentence_transformers.json", lambda config: config.update(prompts=PROMPTS, **settings))
    return path


@pytest.mark.parametrize("name", FAMILIES)
async def test_vectors_agree(name: str, tmp_path: Path, record_agreement: Record):
    path = write(tmp_path, name)
    theirs = reference(path)
    expected = theirs.encode(list(TEXTS))
    one_by_one = [theirs.encode(text, output_value="token_embeddings").numpy() for text in TEXTS]
    async with serving_folder(path) as ours:
        differences = [
            farthest(await ours.embeddings(TEXTS, **WHOLE), expected),
            farthest(await ours.embeddings(TEXTS[1:2], **WHOLE), expected[1:2]),
            farthest(await ours.embeddings(TEXTS[3:4], **WHOLE), expected[3:4]),
            farthest(await ours.embeddings(TEXTS, input_type="query"), theirs.encode_query(list(TEXTS))),
            farthest(await ours.embeddings(TEXTS, input_type="document"), theirs.encode_document(list(TEXTS))),
            farthest(await ours.pooled(TEXTS, task="embed"), expected),
            farthest(await ours.post("/embed", inputs=TEXTS, normalize=False), _without_unit_length(theirs)),
            farthest(await ours.post("/embed", inputs=TEXTS), theirs.encode(list(TEXTS), normalize_embeddings=True)),
        ]
        of_tokens = [
            farthest(await ours.pooled(TEXTS, task="token_embed"), one_by_one),
            farthest(await ours.post("/embed_all", inputs=TEXTS), one_by_one),
        ]
    assert max(differences) < TOLERANCE
    assert max(of_tokens) < TOLERANCE
    record_agreement(name, "embed", ORACLE, max(differences))
    record_agreement(name, "token_embed", ORACLE, max(of_tokens))


def _without_unit_length(theirs: Any) -> Vectors:
    """What the modules in front of Normalize make of the texts."""
    modules = list(theirs)
    features = {key: value for key, value in theirs.preprocess(list(TEXTS)).items()}
    for module in modules:
        if type(module).__name__ != "Normalize":
            features = module(features)
    return features["sentence_embedding"].detach().numpy()


@pytest.mark.parametrize("name", FAMILIES)
async def test_scores_agree(name: str, tmp_path: Path, record_agreement: Record):
    path = write(tmp_path, name)
    difference = await scores_differ(path)
    assert difference < SCORE_TOLERANCE
    record_agreement(name, "score", ORACLE, difference)


@pytest.mark.parametrize("similarity", SIMILARITIES)
async def test_scores_agree_in_every_similarity(similarity: str, tmp_path: Path, record_agreement: Record):
    """The vectors of this family are not of unit length."""
    path = write(tmp_path, "roberta", similarity_fn_name=similarity)
    difference = await scores_differ(path)
    assert difference < SCORE_TOLERANCE
    record_agreement("roberta", f"score by {similarity}", ORACLE, difference)


async def scores_differ(path: Path) -> float:
    """Ask each query against all documents by every route that compares texts."""
    theirs = reference(path)
    queries, documents = theirs.encode_query(list(QUERIES)), theirs.encode_document(list(DOCUMENTS))
    expected = theirs.similarity(queries, documents).numpy()
    alike = theirs.similarity(theirs.encode(list(QUERIES)), theirs.encode(list(DOCUMENTS))).numpy()
    async with serving_folder(path) as ours:
        found = {
            "/score": [await ours.scores(query, DOCUMENTS) for query in QUERIES],
            "/rerank": [await ours.reranked(query, DOCUMENTS) for query in QUERIES],
            "/rerank with texts": [await ours.reranked_as_tei(query, DOCUMENTS) for query in QUERIES],
        }
        paired = await ours.scores(QUERIES, DOCUMENTS[: len(QUERIES)])
        symmetric = [await similarities(ours, query) for query in QUERIES]
    for rows in found.values():
        assert_same_ranking(np.stack(rows), expected)
    return max(
        *(farthest(rows, expected) for rows in found.values()),
        farthest([paired], [np.diag(expected)]),
        farthest(symmetric, alike),
    )


async def similarities(ours: AskedFolder, query: str) -> Any:
    return await ours.post("/similarity", inputs={"source_sentence": query, "sentences": DOCUMENTS})


# -- texts in windows -----------------------------------------------------------------------------------

WHOLE_WORDS = ("bert", "distilbert", "mpnet", "xlm-roberta")
"""Families whose tokenizers have words that are one token wherever they are: windows of them are texts. Two have
vectors of unit length, two have not."""


def single_tokens(tokenizer: Any, words: list[str]) -> list[str]:
    return [word for word in dict.fromkeys(words) if len(tokenizer.tokenize(word)) == 1]


def mean_of_windows(theirs: Any, windows: list[str], *, is_unit: bool, **how: Any) -> Vectors:
    """Weigh each window's vector by its tokens; as long as one where each of them is."""
    vectors = theirs.encode(windows, **how)
    prompt = PROMPTS["query"] if "prompt_name" in how else ""
    weights = np.array([len(theirs.tokenizer(prompt + window)["input_ids"]) for window in windows], dtype=np.float64)
    mean = (vectors * weights[:, None]).sum(axis=0) / weights.sum()
    return mean / np.linalg.norm(mean) if is_unit else mean


@pytest.mark.parametrize("name", WHOLE_WORDS)
async def test_the_vector_of_a_long_text_is_the_mean_of_its_windows(
    name: str, tmp_path: Path, record_agreement: Record
):
    path = write(tmp_path, name)
    theirs = reference(path)
    words = single_tokens(theirs.tokenizer, TEXTS[3].lower().replace(".", "").replace(",", "").replace(":", "").split())
    assert len(words) > 5
    special = len(theirs.tokenizer("")["input_ids"])
    prompt = len(theirs.tokenizer(PROMPTS["query"])["input_ids"]) - special
    long = [words[(index * index) % len(words)] for index in range(3 * MAX_LENGTH + 11)]
    text, fits = " ".join(long), [TEXTS[0], " ".join(long[: MAX_LENGTH - special])]

    def windows(size: int) -> list[str]:
        return [" ".join(long[start : start + size]) for start in range(0, len(long), size)]

    plain, prompted = windows(MAX_LENGTH - special), windows(MAX_LENGTH - special - prompt)
    assert len(theirs.tokenizer(text, verbose=False)["input_ids"]) == len(long) + special
    is_unit = any(type(module).__name__ == "Normalize" for module in theirs)
    expected = mean_of_windows(theirs, plain, is_unit=is_unit)
    of_unit = mean_of_windows(theirs, plain, is_unit=True, normalize_embeddings=True)
    of_queries = mean_of_windows(theirs, prompted, is_unit=is_unit, prompt_name="query")
    async with serving_folder(path, long_text="chunk") as ours:
        together = await ours.embeddings([fits[0], text, fits[1]])
        differences = [
            farthest(together, [theirs.encode(fits[0]), expected, theirs.encode(fits[1])]),
            farthest(await ours.embeddings([text]), [expected]),
            farthest(await ours.embeddings([text], prompt_name="query"), [of_queries]),
            farthest(await ours.post("/embed", inputs=text, truncate=False), [of_unit]),
            farthest(await ours.embeddings([text], **WHOLE), theirs.encode([text])),
        ]
        usage = (await ours.post("/v1/embeddings", input=text))["usage"]
    async with serving_folder(path) as unchunked:
        assert np.array_equal(await unchunked.embeddings(fits[1:]), together[2:])
        refused = await unchunked.client.post("/v1/embeddings", json={"input": text})
    assert refused.status_code == 400
    assert usage["prompt_tokens"] == len(long) + special * len(plain)
    assert np.abs(expected - theirs.encode(text)).max() > 100 * TOLERANCE, "agreement would prove nothing"
    assert max(differences) < TOLERANCE
    record_agreement(name, "embed in windows", ORACLE, max(differences))
