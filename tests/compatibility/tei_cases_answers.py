"""Cases of what answers look like, and of the statuses, on every route."""

from typing import Any

import httpx

from tests.compatibility.tei_cases import SUBJECTS, case
from tests.compatibility.tei_record import RECORD, ROUTES, SAME, Seen, differs, further_keys, more, shape_faults
from tests.compatibility.tei_servers import Servers
from tests.compatibility.tei_states import full

OPENAI = "POST /v1/embeddings"
ALL = tuple(SUBJECTS)

EMPTY: dict[str, dict[str, object]] = {
    "POST /rerank": {"query": "who owns", "texts": []},
    "POST /similarity": {"inputs": {"source_sentence": "bread", "sentences": []}},
    "POST /decode": {"ids": []},
    OPENAI: {"input": []},
}
WRONG: dict[str, dict[str, object]] = {
    "POST /rerank": {"query": 5, "texts": ["bread"]},
    "POST /similarity": {"inputs": "bread"},
    "POST /decode": {"ids": "bread"},
    OPENAI: {"input": 5},
}
OTHER_KIND = {"embedding": "classifier", "splade": "embedding", "classifier": "embedding", "reranker": "classifier"}


def many(route: str, servers: Servers) -> dict[str, Any]:
    """Return a body of one input more than the server takes."""
    count = servers.get("embedding", "/info").json()["max_client_batch_size"] + 1
    bodies = {
        "POST /rerank": {"query": "a", "texts": ["b"] * count},
        "POST /similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"] * count}},
        "POST /predict": {"inputs": [["b"]] * count},
        "POST /decode": {"ids": [[5]] * count},
        OPENAI: {"input": ["b"] * count},
    }
    return bodies.get(route, {"inputs": ["b"] * count})


def error_type(route: str, answer: httpx.Response) -> str:
    """Return the type of an error; its body must be that of the route's dialect."""
    body = answer.json()
    if route == OPENAI:
        return body["error"]["type"]
    assert list(body) == ["error", "error_type"], body
    return body["error_type"]


def compared(route: str, answer: httpx.Response, status: int, kind: str) -> Seen:
    """Compare an error's status and type with TEI's."""
    assert 400 <= answer.status_code < 500, answer.text
    found = (answer.status_code, error_type(route, answer))
    return SAME if found == (status, kind) else differs(f"{found[0]} `{found[1]}`")


@case("response", *ALL)
def shapes(servers: Servers, route: str) -> Seen:
    subject, shape = SUBJECTS[route], ROUTES[route]["response"]
    answer = servers.ask(subject.kind, subject.path, **subject.body)
    assert not [*shape_faults(shape, answer)]
    further = ", ".join(f"`{key}`" for key in sorted(further_keys(shape, answer)))
    return more(f"also {further}") if further else SAME


def counted(servers: Servers, route: str) -> tuple[int, int]:
    """Return the tokens and the characters that TEI counts for the body of a route's subject."""
    subject = SUBJECTS[route]
    ids = servers.oracle(subject.kind).ids
    match subject.body:
        case {"query": str(query), "texts": [*texts]}:
            return sum(len(ids(query, text)) for text in texts), sum(len(query + text) for text in texts)
        case {"inputs": {"source_sentence": source, "sentences": [*sentences]}}:
            texts = [source, *sentences]
        case {"inputs": str(text)}:
            texts = [text]
        case {"inputs": [*texts]} | {"input": [*texts]}:
            pass
    return sum(len(ids(text)) for text in texts), sum(map(len, texts))


@case("headers", *(route for route in ALL if "headers" in ROUTES[route]))
def headers(servers: Servers, route: str) -> Seen:
    subject = SUBJECTS[route]
    answer = servers.post(subject.kind, subject.path, subject.body)
    missing = ", ".join(f"`{name}`" for name in RECORD["headers"] if name not in answer.headers)
    if "x-compute-tokens" not in answer.headers:
        return differs("none of them; `Server-Timing` shows the times")
    tokens, characters = counted(servers, route)
    assert int(answer.headers["x-compute-tokens"]) == tokens
    times = ("x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time")
    total, *parts = (int(answer.headers[name]) for name in times)
    assert 0 <= max(parts) <= total + 1
    notes = [f"without {missing}"] if missing else []
    if int(answer.headers["x-compute-characters"]) != characters:
        notes.append("`x-compute-characters` counts a query once, not for each text")
    return differs("; ".join(notes)) if notes else SAME


def ask(servers: Servers, route: str, body: dict[str, Any]) -> httpx.Response:
    return servers.post(SUBJECTS[route].kind, SUBJECTS[route].path, body)


@case("400", *ALL)
def nothing_given(servers: Servers, route: str) -> Seen:
    return compared(route, ask(servers, route, EMPTY.get(route, {"inputs": []})), 400, "Empty")


@case("413", *ALL)
def too_many(servers: Servers, route: str) -> Seen:
    return compared(route, ask(servers, route, many(route, servers)), 422, "Validation")


@case("422", *ALL)
def wrong(servers: Servers, route: str) -> Seen:
    return compared(route, ask(servers, route, WRONG.get(route, {"inputs": 5})), 422, "Validation")


@case("424", *(route for route in ALL if "424" in ROUTES[route]["statuses"]))
def not_for_this_model(servers: Servers, route: str) -> Seen:
    subject = SUBJECTS[route]
    return compared(route, servers.post(OTHER_KIND[subject.kind], subject.path, subject.body), 424, "Backend")


@case("429", *(route for route in ALL if "429" in ROUTES[route]["statuses"]))
def too_busy(servers: Servers, route: str) -> Seen:
    subject = SUBJECTS[route]
    with full(servers.scripted, subject.kind, subject.path, subject.body) as http:
        answer = http.post(subject.path, json=subject.body)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) > 0
    seen = compared(route, answer, 429, "Overloaded")
    return more("with `Retry-After`") if seen == SAME else seen
