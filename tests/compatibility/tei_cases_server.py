"""Cases of the routes about the server itself, of routes that stand for others, and of what all routes share."""

import httpx

from tests.compatibility.tei_cases import SUBJECTS, case
from tests.compatibility.tei_record import ROUTES, SAME, SERVER, Seen, differs, further_keys, more, shape_faults
from tests.compatibility.tei_servers import PROMPT, Servers, near
from tests.compatibility.tei_states import loading
from tests.end_to_end.conftest import LABELS
from tests.end_to_end.texts import API_KEY

MODEL_TYPES = {
    "embedding": {"embedding": {"pooling": "mean"}},
    "splade": {"embedding": {"pooling": "splade"}},
    "classifier": {
        "classifier": {
            "id2label": {str(index): label for index, label in LABELS.items()},
            "label2id": {label: index for index, label in LABELS.items()},
        }
    },
    "reranker": {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}},
}
PUBLIC = ("/", "/health", "/ping", "/metrics", "/docs")
ORIGIN = {"Origin": "https://example.org"}


@case("response", "GET /info")
def info(servers: Servers, route: str) -> Seen:
    faults, further = set(), set()
    for kind, model_type in MODEL_TYPES.items():
        told = servers.get(kind, "/info").json()
        assert told["model_type"] == model_type
        assert (told["model_id"], told["served_model_name"]) == (kind, kind)  # of a folder, no path
        assert told["max_input_length"] == servers.oracle(kind).max_length
        faults |= {*shape_faults(ROUTES[route]["response"], told)}
        further |= further_keys(ROUTES[route]["response"], told)
    assert not further
    return differs(", ".join(sorted(faults))) if faults else SAME


@case("response", "GET /metrics")
def metrics(servers: Servers, route: str) -> Seen:
    answer = servers.get("embedding", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "# TYPE trio_pool_serve_" in answer.text
    return SAME if "# TYPE te_queue_size" in answer.text else differs("the names begin with `trio_pool_serve_`")


def healthy(servers: Servers, path: str) -> Seen:
    found = {client.get(servers.urls["embedding"] + path).status_code for client in (servers.http, servers.stranger)}
    return SAME if found == {200} else differs(f"status {', '.join(map(str, sorted(found)))}")


@case("response", "GET /health", "GET /ping")
def health(servers: Servers, route: str) -> Seen:
    seen = healthy(servers, route.partition(" ")[2])
    assert seen == SAME
    return more("with a JSON body")


@case("response", "GET /")
def health_at_the_root(servers: Servers, route: str) -> Seen:
    return healthy(servers, "/")


@case("503", "GET /health")
def unhealthy_while_loading(servers: Servers, route: str) -> Seen:
    with loading(servers.scripted) as (http, loaded):
        assert http.get("/livez").status_code == 200
        for path in ("/health", "/ping", "/readyz"):
            assert http.get(path).status_code == 503, path
        loaded.set()
        while http.get("/readyz").status_code == 503:
            pass
        assert http.get("/health").status_code == 200
    return more("while the model loads, when TEI does not listen yet")


# -- routes that stand for others ------------------------------------------------------------------------

MAIN_ROUTES = {"embedding": "/embed", "splade": "/embed_sparse", "classifier": "/predict", "reranker": "/rerank"}


@case("response", "POST /", "POST /invocations")
def by_the_model(servers: Servers, route: str) -> Seen:
    path = route.partition(" ")[2]
    for kind, main in MAIN_ROUTES.items():
        body = SUBJECTS[f"POST {main}"].body
        if kind == "classifier":
            body = {"inputs": [["a nursery"], ["bread"]]}
        assert servers.ask(kind, path, **body) == servers.ask(kind, main, **body)
    compared = SUBJECTS["POST /similarity"].body
    near(servers.ask("embedding", path, **compared), servers.ask("embedding", "/similarity", **compared))
    one = servers.ask("classifier", path, inputs="a nursery")
    note = "also as `/similarity`"
    if isinstance(one[0], list):
        return differs(f"{note}; a single text's labels are in a list, as huggingface_hub expects")
    return more(note)


@case("instances response", "POST /vertex")
def vertex(servers: Servers, route: str) -> Seen:
    found = {}
    for kind, main in MAIN_ROUTES.items():
        body = SUBJECTS[f"POST {main}"].body
        answer = servers.post(kind, "/vertex", {"instances": [body, body]})
        found[answer.status_code] = True
        if answer.status_code == 200:
            assert answer.json() == {"predictions": [servers.ask(kind, main, **body)] * 2}
    return SAME if {*found} == {200} else differs(f"not offered ({', '.join(map(str, found))})")


# -- the server ------------------------------------------------------------------------------------------


@case("API-key", SERVER)
def keys(servers: Servers, route: str) -> Seen:
    url = servers.urls["embedding"]
    for path in ("/embed", "/v1/embeddings", "/info"):
        for key in ("Bearer wrong", "wrong", ""):
            headers = {"Authorization": key}
            answer = servers.stranger.request("GET" if path == "/info" else "POST", url + path, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
    without_bearer = servers.stranger.get(f"{url}/info", headers={"Authorization": API_KEY})
    assert without_bearer.status_code == 200
    return more("also without `Bearer`; 401 returns a body")


@case("public-routes", SERVER)
def routes_without_a_key(servers: Servers, route: str) -> Seen:
    url = servers.urls["embedding"]
    closed = [f"`{path}`" for path in PUBLIC if servers.stranger.get(url + path).status_code != 200]
    return differs(f"a key for {', '.join(closed)}; see `--api-key-scope`") if closed else SAME


@case("CORS", SERVER)
def cors(servers: Servers, route: str) -> Seen:
    answer = servers.http.post(servers.urls["embedding"] + "/embed", json={"inputs": "bread"}, headers=ORIGIN)
    allowed = answer.headers.get("access-control-allow-origin")
    return SAME if allowed == "*" else differs("no origin")


@case("errors", SERVER)
def error_bodies(servers: Servers, route: str) -> Seen:
    for path in ("/embed", "/predict", "/info"):
        answer = servers.stranger.request("GET" if path == "/info" else "POST", servers.urls["embedding"] + path)
        assert {*answer.json()} == {"error", "error_type"}
    return more("further types `Unauthorized`, `Timeout`, `UnsupportedMediaType`")


@case("errors-of-/v1/embeddings", SERVER)
def openai_error_bodies(servers: Servers, route: str) -> Seen:
    body = servers.post("embedding", "/v1/embeddings", {"input": 5}).json()
    if {"message", "code", "type"} <= {*body}:
        return SAME
    assert {*body["error"]} == {"message", "type", "param", "code"}
    return differs('OpenAI\'s `{"error": {"message", "type", "param", "code"}}`')


def raw(servers: Servers, content: bytes, media_type: str | None) -> httpx.Response:
    headers = {"Content-Type": media_type} if media_type else {}
    return servers.http.post(servers.urls["embedding"] + "/embed", content=content, headers=headers)


@case("malformed-JSON", SERVER)
def malformed(servers: Servers, route: str) -> Seen:
    answer = raw(servers, b'{"inputs": "bread"', "application/json")
    return differs(f"{answer.status_code} `{answer.json()['error_type']}`, in JSON")


@case("wrong-type", SERVER)
def wrong_type(servers: Servers, route: str) -> Seen:
    answer = servers.post("embedding", "/embed", {"inputs": 5})
    assert (answer.status_code, answer.json()["error_type"]) == (422, "Validation")
    return more("with the same JSON body as other errors")


@case("empty-text", SERVER)
def empty_text(servers: Servers, route: str) -> Seen:
    bodies = {"/embed": {"inputs": ["bread", ""]}, "/tokenize": {"inputs": ""}, "/v1/embeddings": {"input": ""}}
    statuses = {path: servers.post("embedding", path, body).status_code for path, body in bodies.items()}
    accepted = [f"`{path}`" for path, status in statuses.items() if status == 200]
    return differs(f"accepted on {', '.join(accepted)}") if accepted else SAME


@case("no-content-type", SERVER)
def content_types(servers: Servers, route: str) -> Seen:
    assert raw(servers, b'{"inputs": "bread"}', "text/plain").status_code == 415
    without = raw(servers, b'{"inputs": "bread"}', None)
    return SAME if without.status_code == 415 else more("a body without a type is read as JSON")


@case("body-too-large", SERVER)
def too_large(servers: Servers, route: str) -> Seen:
    answer = raw(servers, b'{"inputs": "' + b" " * 2**24 + b'"}', "application/json")
    assert (answer.status_code, answer.json()["error_type"]) == (413, "Validation")
    return more("the limit is 16 MiB")


@case("default-prompt", SERVER)
def default_prompts(servers: Servers, route: str) -> Seen:
    oracle = servers.oracle("embedding")
    near(servers.ask("embedding", "/embed", inputs="bread"), [oracle.vector("bread")])
    near(servers.ask("embedding", "/embed", inputs="bread", prompt_name="query"), [oracle.vector(f"{PROMPT}bread")])
    return SAME


@case("null", SERVER)
def nulls(servers: Servers, route: str) -> Seen:
    for subject in SUBJECTS.values():
        optional = [name for name, field in ROUTES[subject.route]["fields"].items() if not field.get("required")]
        nulls = {name: None for name in optional if "." not in name}  # without the fields of /similarity's parameters
        plain = servers.ask(subject.kind, subject.path, **subject.body)
        nulled = servers.ask(subject.kind, subject.path, **subject.body, **nulls)
        assert (type(nulled), len(nulled)) == (type(plain), len(plain))
    return more("null is the same as leaving any optional field out")


@case("batch-limit", SERVER)
def batch_limit(servers: Servers, route: str) -> Seen:
    limit = servers.get("embedding", "/info").json()["max_client_batch_size"]
    inputs = [[5]] * limit
    assert len(servers.ask("embedding", "/embed", inputs=inputs, dimensions=1)) == limit
    assert servers.post("embedding", "/embed", {"inputs": [*inputs, [5]]}).status_code == 422
    return more(f"{limit}; `/similarity` counts sentences only")
