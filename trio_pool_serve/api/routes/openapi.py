"""``/openapi.json`` describes every route; ``/docs`` shows it in a browser."""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
from attrs import frozen
from quart import Blueprint

import trio_pool_serve
from trio_pool_serve.api.http.answer import Answer
from trio_pool_serve.api.http.dispatch import Candidate, candidates_by_path
from trio_pool_serve.api.http.endpoint import Dialect
from trio_pool_serve.api.http.quart_routes import responding
from trio_pool_serve.errors import NotFoundError

SWAGGER_UI = files("swagger_ui") / "static"

ASSETS: Mapping[str, str] = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
"""What the page needs, all of it served from here."""

PAGE = b"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>trio_pool_serve</title><link rel="stylesheet" href="docs/swagger-ui.css"></head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "openapi.json", dom_id: "#swagger-ui", validatorUrl: null})</script>
</body>
</html>
"""


@frozen
class Question:
    """A route that is asked without a body: its answer as an example, and what it is for."""

    summary: str
    example: Any


QUESTIONS: Mapping[str, Question] = {
    "/v1/models": Question("The models that are served.", {"object": "list", "data": [{"id": "org/model"}]}),
    "/v1/models/{name}": Question("One model.", {"id": "org/model", "object": "model", "task": "embed"}),
    "/info": Question("The default model, as text-embeddings-inference describes its own.", {"model_id": "org/model"}),
    "/livez": Question("Whether the process is worth keeping.", {"status": "alive"}),
    "/health": Question("As /livez.", {"status": "alive"}),
    "/ping": Question("As /livez.", {"status": "alive"}),
    "/readyz": Question("Whether requests are answered now.", {"status": "ready"}),
    "/metrics": Question("Metrics in the Prometheus text format.", "trio_pool_serve_requests_total 3.0"),
    "/load": Question(
        "What engines, threads, processes and the cache of images are doing now.",
        {"models": {}, "limiters": {}, "workers": {}, "media_cache": {}, "media_fetches": {}},
    ),
    "/version": Question("The server's version.", {"version": trio_pool_serve.__version__}),
    "/openapi.json": Question("This document.", {"openapi": "3.1.0"}),
    "/docs": Question("This document, for people.", "<!doctype html>"),
}

ORDERS: Mapping[str, Question] = {
    "/reset_mm_cache": Question("Forget the prepared images that are kept.", {"status": "cleared"}),
}
"""What is asked by POST without a body."""


@cache
def openapi_document(dialects: tuple[Dialect, ...]) -> bytes:
    """Return the OpenAPI 3.1 document of all routes, as JSON; made once, whatever listeners come and go."""
    by_path = candidates_by_path(dialects)
    endpoints = [candidate.endpoint for candidates in by_path.values() for candidate in candidates]
    types = list(
        dict.fromkeys(
            [endpoint.wire for endpoint in endpoints]
            + [endpoint.response for endpoint in endpoints if endpoint.response is not None]
        )
    )
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    paths = {path: {"post": _task_route(candidates, schema_of)} for path, candidates in by_path.items()}
    for path, question in QUESTIONS.items():
        paths.setdefault(path, {})["get"] = _question_route(question)
    for path, order in ORDERS.items():
        paths.setdefault(path, {})["post"] = _question_route(order)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "trio_pool_serve", "version": trio_pool_serve.__version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }
    return msgspec.json.encode(document)


def _task_route(candidates: Sequence[Candidate], schema_of: Mapping[type, Any]) -> dict[str, Any]:
    endpoints = [candidate.endpoint for candidate in candidates]
    bodies = [schema_of[endpoint.wire] for endpoint in endpoints]
    examples = {
        candidate.dialect.name: {"summary": candidate.endpoint.summary, "value": candidate.endpoint.example}
        for candidate in candidates
    }
    answers = [schema_of[endpoint.response] for endpoint in endpoints if endpoint.response is not None]
    answer = {"application/json": {"schema": {"anyOf": answers}}} if answers else {"application/json": {}}
    return {
        "tags": [candidates[-1].dialect.name],
        "summary": " ".join(dict.fromkeys(endpoint.summary for endpoint in endpoints)),
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"anyOf": bodies}, "examples": examples}},
        },
        "responses": {
            "200": {"description": "The answer.", "content": answer},
            "default": {"description": "An error, as the dialect's clients read it."},
        },
    }


def _question_route(question: Question) -> dict[str, Any]:
    content_type = "application/json" if isinstance(question.example, dict) else "text/plain"
    described = {"description": "The answer.", "content": {content_type: {"example": question.example}}}
    return {"tags": ["operations"], "summary": question.summary, "responses": {"200": described}}


def openapi_routes(dialects: tuple[Dialect, ...]) -> Blueprint:
    """Return the routes of the document and of the page that shows it, which fetches nothing from outside."""
    routes = Blueprint("openapi", __name__)
    document = openapi_document(dialects)
    assets = {name: (SWAGGER_UI / name).read_bytes() for name in ASSETS}

    @routes.get("/openapi.json")
    @responding
    async def openapi() -> Answer:
        return Answer(document, content_type="application/json")

    @routes.get("/docs")
    @responding
    async def docs() -> Answer:
        return Answer(PAGE, content_type="text/html; charset=utf-8")

    @routes.get("/docs/<name>")
    @responding
    async def asset(name: str) -> Answer:
        if name not in assets:
            raise NotFoundError("There is no such page.")
        return Answer(assets[name], content_type=ASSETS[name])

    return routes
