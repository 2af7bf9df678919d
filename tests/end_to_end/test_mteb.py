"""MTEB's tasks that need no downloads, against a live server: by the adapter of docs/mteb.md and MTEB's own wrappers.

MTEB is imported by the tests, which takes five seconds.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import serving_in_a_thread
from tests.end_to_end.texts import API_KEY
from tests.page_blocks import blocks_of
from tests.server.server_process import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # MTEB's own, of what its tasks are made with
]

BLOCKS = [block.text for block in blocks_of(ROOT / "docs" / "mteb.md") if block.language == "python"]
ADAPTER, MOCK_RUN, REAL_RUN, WRAPPERS = BLOCKS


@pytest.fixture(autouse=True, scope="module")
def offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HUB_OFFLINE", "1")
        environment.setenv("HF_DATASETS_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def listing_url(folders: Mapping[str, Path]) -> Iterator[str]:
    """A server whose list of models needs no key."""
    models = [f"{name}={folders[name]}" for name in ("minilm", "reranker")]
    with serving_in_a_thread(*models, scope="all-but-models", truncates=True) as url:
        yield url


def names_of(program: str, server: str, *, names: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run a program of the page, and return its names."""
    known = dict(names or {})
    for port in ("8000", "8001"):
        program = program.replace(f"http://127.0.0.1:{port}", server)
    exec(program.replace("secret", API_KEY), known)
    return known


def scores_of(results: Any) -> dict[str, float | str]:
    """Return the main score of every task that was run, or why it failed."""
    ran = {name: result for name, result in results.task_results.items() if result is not None}
    return {
        name: result.get_score() if hasattr(result, "get_score") else result.exception for name, result in ran.items()
    }


def assert_same_scores(found: Mapping[str, Any], expected: Mapping[str, Any]) -> int:
    """Compare scores, and reasons of failures; return the number of scores."""
    assert found.keys() == expected.keys()
    numbers = {name: score for name, score in expected.items() if not isinstance(score, str)}
    assert {name: found[name] for name in numbers} == pytest.approx(numbers, abs=1e-6)
    others = expected.keys() - numbers.keys()
    assert {name: found[name] for name in others} == {name: expected[name] for name in others}
    return len(numbers)


@pytest.fixture(scope="module")
def expected(minilm: Path) -> dict[str, float | str]:
    """The scores of sentence-transformers."""
    import mteb
    from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformerEncoderWrapper(SentenceTransformer(str(minilm), device="cpu"))
    return scores_of(mteb.mock_run(model))


def test_the_adapter_of_the_page_has_the_scores_of_sentence_transformers(server_url, expected, capsys, record_client):
    record_client("OpenAI", "POST /v1/embeddings", "mteb (adapter of docs/mteb.md)")
    names = names_of(ADAPTER, server_url)
    with names["Served"].client:
        results = names_of(MOCK_RUN, server_url, names=names)["results"]
    assert assert_same_scores(scores_of(results), expected) == len(expected) > 20


def test_mteb_s_own_wrapper_has_the_scores_of_sentence_transformers(listing_url, expected, record_client):
    import mteb

    record_client("OpenAI", "POST /v1/embeddings", "mteb (OpenAIAPIEncodeWrapper)")
    names = names_of(WRAPPERS, listing_url)
    assert assert_same_scores(scores_of(mteb.mock_run(names["encoder"])), expected) > 20


def test_mteb_s_own_wrapper_reranks(listing_url, folders, record_client):
    import mteb
    from mteb.models.sentence_transformer_wrapper import CrossEncoderWrapper

    from tests.models.classifier_families import cross_encoder

    record_client("vLLM", "POST /v1/rerank", "mteb (OpenAIAPIRerankWrapper)")
    names = names_of(WRAPPERS, listing_url)
    oracle = CrossEncoderWrapper(cross_encoder(folders["reranker"]))
    found, expected = (scores_of(mteb.mock_run(model)) for model in (names["reranker"], oracle))
    assert assert_same_scores(found, expected) > 3


def test_the_wrappers_say_so_where_the_list_of_models_needs_a_key(server_url):
    with pytest.raises(ConnectionError, match="401"):
        names_of(WRAPPERS, server_url)


def test_the_real_run_of_the_page_names_tasks_that_mteb_has():
    import mteb

    named = mteb.get_tasks(tasks=["STSBenchmark", "NFCorpus"])
    assert [task.metadata.name for task in named] == ["STSBenchmark", "NFCorpus"]
    assert all(task.metadata.name in REAL_RUN for task in named)
    assert named[0].metadata.main_score == "cosine_spearman"
    assert named[1].metadata.main_score == "ndcg_at_10"
