"""Cases of the routes that answer with vectors, and of their cosines."""

import base64
from typing import Any

import numpy as np

from tests.compatibility.tei_cases import SUBJECTS, case
from tests.compatibility.tei_record import SAME, Seen, differs, more
from tests.compatibility.tei_servers import LONG, PROMPT, Numbers, Servers, near

EMBED, EMBED_ALL, EMBED_SPARSE = "POST /embed", "POST /embed_all", "POST /embed_sparse"
SIMILARITY, OPENAI = "POST /similarity", "POST /v1/embeddings"
VECTORS = (EMBED, EMBED_ALL, EMBED_SPARSE)
TEXTS = ["who owns a task", "bread", "a nursery owns its tasks"]


def rows(servers: Servers, route: str, **body: Any) -> list[Numbers]:
    """Ask one of the three routes, and return an array per input."""
    subject = SUBJECTS[route]
    answer = servers.ask(subject.kind, subject.path, **body)
    if route != EMBED_SPARSE:
        return [np.array(row, dtype=np.float32) for row in answer]
    width = servers.oracle("splade").model.config.vocab_size
    dense = np.zeros((len(answer), width), dtype=np.float32)
    for at, row in enumerate(answer):
        assert all(entry["value"] != 0 for entry in row)
        dense[at, [entry["index"] for entry in row]] = [entry["value"] for entry in row]
    return list(dense)


def expected(servers: Servers, route: str, text: str, side: str = "Right") -> Numbers:
    oracle = servers.oracle(SUBJECTS[route].kind)
    if route == EMBED_ALL:
        return oracle.tokens(text, side=side)
    return oracle.vector(text, side=side) if route == EMBED else oracle.weights(text, side=side)


@case("inputs", *VECTORS)
def texts_and_token_ids(servers: Servers, route: str) -> Seen:
    for text, row in zip(TEXTS, rows(servers, route, inputs=TEXTS), strict=True):
        near(row, expected(servers, route, text))
    ids = servers.oracle(SUBJECTS[route].kind).ids
    for alone in (TEXTS[0], [TEXTS[0]], ids(TEXTS[0]), [ids(TEXTS[0])]):
        (row,) = rows(servers, route, inputs=alone)
        near(row, expected(servers, route, TEXTS[0]))
    if route == EMBED_ALL:
        vectors = [np.array(row) for row in servers.ask("colbert", "/embed_all", inputs=TEXTS)]
        assert len({row.shape[0] for row in vectors}) == len(TEXTS), "as many vectors as tokens"
        near(np.linalg.norm(np.concatenate(vectors), axis=1), np.ones(sum(map(len, vectors))))
    mixed = servers.post(SUBJECTS[route].kind, SUBJECTS[route].path, {"inputs": [TEXTS[0], ids(TEXTS[1])]})
    if mixed.status_code == 200:
        return SAME
    return differs("a list contains texts or lists of ids, not both")


@case("truncate", *VECTORS)
def truncating(servers: Servers, route: str) -> Seen:
    for given in ({}, {"truncate": None}, {"truncate": True}):
        (row,) = rows(servers, route, inputs=LONG, **given)
        near(row, expected(servers, route, LONG))
    subject = SUBJECTS[route]
    refused = servers.post(subject.kind, subject.path, {"inputs": LONG, "truncate": False})
    assert (refused.status_code, refused.json()["error_type"]) == (422, "Validation")
    (row,) = rows(servers, route, inputs=TEXTS[0], truncate=False)
    near(row, expected(servers, route, TEXTS[0]))
    return SAME


@case("truncation_direction", *VECTORS)
def truncating_on_a_side(servers: Servers, route: str) -> Seen:
    for direction in ("Right", "right", "Left", "left"):
        (row,) = rows(servers, route, inputs=LONG, truncation_direction=direction)
        near(row, expected(servers, route, LONG, direction.capitalize()))
    return SAME


@case("prompt_name", *VECTORS)
def prompts_of_the_model(servers: Servers, route: str) -> Seen:
    subject = SUBJECTS[route]
    if subject.kind == "embedding":
        (row,) = rows(servers, route, inputs="bread", prompt_name="query")
        near(row, expected(servers, route, PROMPT + "bread"))
    (row,) = rows(servers, route, inputs="bread", prompt_name=None)
    near(row, expected(servers, route, "bread"))
    unknown = servers.post(subject.kind, subject.path, {"inputs": "bread", "prompt_name": "poem"})
    assert (unknown.status_code, unknown.json()["error_type"]) == (422, "Validation")
    return more("`query` and `document` are always accepted")


@case("normalize", EMBED)
def scaling(servers: Servers, route: str) -> Seen:
    oracle = servers.oracle("embedding")
    for given in ({}, {"normalize": True}):
        near(rows(servers, EMBED, inputs="bread", **given)[0], oracle.vector("bread"))
    near(rows(servers, EMBED, inputs="bread", normalize=False)[0], oracle.vector("bread", normalize=False))
    assert np.linalg.norm(oracle.vector("bread", normalize=False)) > 2
    return SAME


@case("dimensions", EMBED)
def fewer_dimensions(servers: Servers, route: str) -> Seen:
    oracle = servers.oracle("embedding")
    for normalize in (True, False):
        (row,) = rows(servers, EMBED, inputs="bread", dimensions=8, normalize=normalize)
        near(row, oracle.vector("bread", dimensions=8, normalize=normalize))
    near(rows(servers, EMBED, inputs="bread", dimensions=None)[0], oracle.vector("bread"))
    for dimensions in (0, 10_000):
        assert servers.post("embedding", "/embed", {"inputs": "bread", "dimensions": dimensions}).status_code == 422
    return SAME


# -- /similarity -----------------------------------------------------------------------------------------


def cosines(servers: Servers, source: str, sentences: list[str], side: str = "Right") -> list[float]:
    vector = servers.oracle("embedding").vector
    return [float(vector(source, side=side) @ vector(sentence, side=side)) for sentence in sentences]


def similarity(servers: Servers, source: str, sentences: list[str], **parameters: Any) -> Any:
    inputs = {"source_sentence": source, "sentences": sentences}
    return servers.ask("embedding", "/similarity", inputs=inputs, **({"parameters": parameters} if parameters else {}))


@case("inputs.source_sentence inputs.sentences", SIMILARITY)
def comparing(servers: Servers, route: str) -> Seen:
    near(similarity(servers, TEXTS[0], TEXTS), cosines(servers, TEXTS[0], TEXTS))
    near(similarity(servers, TEXTS[1], TEXTS[:1]), cosines(servers, TEXTS[1], TEXTS[:1]))
    others = [
        kind
        for kind in ("reranker", "colbert")
        if servers.post(kind, "/similarity", SUBJECTS[SIMILARITY].body).status_code == 200
    ]
    return more(f"also for {' and '.join(others)} models") if others else SAME


@case("parameters.truncate", SIMILARITY)
def comparing_what_is_too_long(servers: Servers, route: str) -> Seen:
    for given in ({}, {"truncate": None}, {"truncate": True}):
        near(similarity(servers, "bread", [LONG], **given), cosines(servers, "bread", [LONG]))
    body = {"inputs": {"source_sentence": "bread", "sentences": [LONG]}, "parameters": {"truncate": False}}
    assert servers.post("embedding", "/similarity", body).status_code == 422
    return SAME


@case("parameters.truncation_direction", SIMILARITY)
def comparing_one_side(servers: Servers, route: str) -> Seen:
    for side in ("Right", "Left"):
        found = similarity(servers, "bread", [LONG], truncation_direction=side)
        near(found, cosines(servers, "bread", [LONG], side))
    return SAME


@case("parameters.prompt_name", SIMILARITY)
def comparing_with_a_prompt(servers: Servers, route: str) -> Seen:
    found = similarity(servers, "bread", ["a nursery"], prompt_name="query")
    near(found, cosines(servers, f"{PROMPT}bread", [f"{PROMPT}a nursery"]))
    return SAME


# -- /v1/embeddings --------------------------------------------------------------------------------------


def openai_vectors(servers: Servers, **body: Any) -> Numbers:
    answer = servers.ask("embedding", "/v1/embeddings", **body)
    assert [row["index"] for row in answer["data"]] == [*range(len(answer["data"]))]
    return np.array([row["embedding"] for row in answer["data"]], dtype=np.float32)


def directions(vectors: Numbers) -> Numbers:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


@case("input", OPENAI)
def openai_input(servers: Servers, route: str) -> Seen:
    oracle = servers.oracle("embedding")
    found = openai_vectors(servers, input=TEXTS)
    near(directions(found), [oracle.vector(text) for text in TEXTS])
    for alone in (TEXTS[0], oracle.ids(TEXTS[0]), [oracle.ids(TEXTS[0])]):
        near(openai_vectors(servers, input=alone), found[:1])
    notes = []
    if abs(np.linalg.norm(found[0]) - 1) > 1e-3:
        notes.append("vectors are scaled if the model's files say so")
    too_long = servers.post("embedding", "/v1/embeddings", {"input": LONG})
    if too_long.status_code != 200:
        notes.append(f"what is too long is refused ({too_long.status_code})")
    near(directions(openai_vectors(servers, input=LONG, truncate_prompt_tokens=-1)), [oracle.vector(LONG)])
    return differs("; ".join(notes)) if notes else SAME


@case("model", OPENAI)
def openai_model(servers: Servers, route: str) -> Seen:
    assert servers.ask("embedding", "/v1/embeddings", input="bread", model="embedding")["model"] == "embedding"
    assert servers.ask("embedding", "/v1/embeddings", input="bread", model=None)["model"] == "embedding"
    unknown = servers.post("embedding", "/v1/embeddings", {"input": "bread", "model": "text-embeddings-inference"})
    return SAME if unknown.status_code == 200 else differs(f"an unknown name is refused ({unknown.status_code})")


@case("user", OPENAI)
def openai_user(servers: Servers, route: str) -> Seen:
    near(openai_vectors(servers, input="bread", user="a user"), openai_vectors(servers, input="bread", user=None))
    return SAME


@case("encoding_format", OPENAI)
def openai_encodings(servers: Servers, route: str) -> Seen:
    floats = openai_vectors(servers, input="bread", encoding_format="float")
    near(openai_vectors(servers, input="bread"), floats)
    answer = servers.ask("embedding", "/v1/embeddings", input="bread", encoding_format="base64")
    near(np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), dtype="<f4"), floats[0])
    return more("also `bytes` and `bytes_only`")


@case("dimensions", OPENAI)
def openai_dimensions(servers: Servers, route: str) -> Seen:
    found = openai_vectors(servers, input="bread", dimensions=8)
    near(directions(found), [servers.oracle("embedding").vector("bread", dimensions=8)])
    return SAME


@case("response", "POST /embeddings")
def openai_without_a_version(servers: Servers, route: str) -> Seen:
    answer = servers.ask("embedding", "/embeddings", input="bread")
    near(answer["data"][0]["embedding"], openai_vectors(servers, input="bread")[0])
    return SAME
