"""Cases of the routes that answer with labels and ranks."""

from typing import Any

import numpy as np
import scipy.special

from tests.compatibility.tei_cases import case
from tests.compatibility.tei_record import SAME, Seen, more
from tests.compatibility.tei_servers import LONG, Numbers, Servers, near
from tests.end_to_end.conftest import LABELS

PREDICT, RERANK = "POST /predict", "POST /rerank"
TEXTS = ["a nursery owns its tasks", "bread needs flour", "hello"]
QUERY = "who owns a task"


def by_label(predictions: list[dict[str, Any]]) -> list[float]:
    """Return the scores in the order of the labels; they must come best first."""
    scores = [row["score"] for row in predictions]
    assert scores == sorted(scores, reverse=True)
    found = {row["label"]: row["score"] for row in predictions}
    return [found[label] for label in LABELS.values()]


def probabilities(servers: Servers, *texts: str, side: str = "Right") -> Numbers:
    return scipy.special.softmax(servers.oracle("classifier").tokens(*texts, side=side))


@case("inputs", PREDICT)
def texts_and_pairs(servers: Servers, route: str) -> Seen:
    one, other = TEXTS[:2]
    for alone in (one, [one]):
        near(by_label(servers.ask("classifier", "/predict", inputs=alone)), probabilities(servers, one))
    near(by_label(servers.ask("classifier", "/predict", inputs=[one, other])), probabilities(servers, one, other))
    batch = servers.ask("classifier", "/predict", inputs=[[one], [one, other], [other]])
    for found, texts in zip(batch, ([one], [one, other], [other]), strict=True):
        near(by_label(found), probabilities(servers, *texts))
    ((only,),) = servers.ask("reranker", "/predict", inputs=[[one, other]])
    near(only["score"], scipy.special.expit(servers.oracle("reranker").tokens(one, other)[0]))
    assert servers.post("classifier", "/predict", {"inputs": [one, other, one]}).status_code == 422
    return SAME


@case("truncate truncation_direction", PREDICT)
def classifying_what_is_too_long(servers: Servers, route: str) -> Seen:
    for given in ({}, {"truncate": None}, {"truncate": True}, {"truncation_direction": "Left"}):
        found = servers.ask("classifier", "/predict", inputs=LONG, **given)
        near(by_label(found), probabilities(servers, LONG, side=given.get("truncation_direction", "Right")))
    refused = servers.post("classifier", "/predict", {"inputs": LONG, "truncate": False})
    assert (refused.status_code, refused.json()["error_type"]) == (422, "Validation")
    return SAME


@case("raw_scores", PREDICT)
def logits_of_labels(servers: Servers, route: str) -> Seen:
    near(
        by_label(servers.ask("classifier", "/predict", inputs=TEXTS[0], raw_scores=True)),
        servers.oracle("classifier").tokens(TEXTS[0]),
    )
    found = servers.ask("classifier", "/predict", inputs=TEXTS[0], raw_scores=False)
    near(by_label(found), probabilities(servers, TEXTS[0]))
    return SAME


# -- /rerank ---------------------------------------------------------------------------------------------


def scores_of(servers: Servers, texts: list[str], **body: Any) -> list[float]:
    """Rank texts, and return their scores in their own order; they must come best first."""
    ranks = servers.ask("reranker", "/rerank", **{"query": QUERY, "texts": texts, **body})
    scores = [rank["score"] for rank in ranks]
    assert scores == sorted(scores, reverse=True)
    assert sorted(rank["index"] for rank in ranks) == [*range(len(texts))]
    return [rank["score"] for rank in sorted(ranks, key=lambda rank: rank["index"])]


def logits(servers: Servers, texts: list[str], query: str = QUERY, side: str = "Right") -> Numbers:
    return np.array([servers.oracle("reranker").tokens(query, text, side=side)[0] for text in texts])


@case("query texts", RERANK)
def ranking(servers: Servers, route: str) -> Seen:
    near(scores_of(servers, TEXTS), scipy.special.expit(logits(servers, TEXTS)))
    near(scores_of(servers, TEXTS, query="bread"), scipy.special.expit(logits(servers, TEXTS, "bread")))
    body = {"query": QUERY, "texts": TEXTS}
    others = [kind for kind in ("embedding", "colbert") if servers.post(kind, "/rerank", body).status_code == 200]
    return more(f"also for {' and '.join(others)} models, by the similarity of vectors") if others else SAME


@case("truncate truncation_direction", RERANK)
def ranking_what_is_too_long(servers: Servers, route: str) -> Seen:
    for given in ({}, {"truncate": None}, {"truncate": True}, {"truncation_direction": "Left"}):
        found = scores_of(servers, [LONG, *TEXTS], **given)
        side = given.get("truncation_direction", "Right")
        near(found, scipy.special.expit(logits(servers, [LONG, *TEXTS], side=side)))
    refused = servers.post("reranker", "/rerank", {"query": QUERY, "texts": [LONG], "truncate": False})
    assert (refused.status_code, refused.json()["error_type"]) == (422, "Validation")
    return SAME


@case("raw_scores", RERANK)
def logits_of_texts(servers: Servers, route: str) -> Seen:
    near(scores_of(servers, TEXTS, raw_scores=True), logits(servers, TEXTS))
    near(scores_of(servers, TEXTS, raw_scores=False), scipy.special.expit(logits(servers, TEXTS)))
    return SAME


@case("return_text", RERANK)
def texts_in_the_answer(servers: Servers, route: str) -> Seen:
    for given, wanted in (({}, False), ({"return_text": False}, False), ({"return_text": True}, True)):
        ranks = servers.ask("reranker", "/rerank", query=QUERY, texts=TEXTS, **given)
        assert [rank.get("text") for rank in ranks] == [TEXTS[rank["index"]] if wanted else None for rank in ranks]
        assert all(("text" in rank) == wanted for rank in ranks)
    return SAME
