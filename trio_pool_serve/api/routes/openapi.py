"""``/openapi.json`` describes every route; ``/docs`` shows it in a browser."""

from collections.abc import Collection, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import trio
from attrs import frozen

import trio_pool_serve
from trio_pool_serve.api.http.endpoint import Dialect, DialectEndpoint
from trio_pool_serve.api.http.endpoint_choice import PathByFields, endpoints_by_path
from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.api.http.route_table import Routes, fixed
from trio_pool_serve.api.routes.operations import RUNNING

Route: TypeAlias = tuple[str, str]
"""Method and path."""

SWAGGER_UI = Path(find_spec("swagger_ui").origin).with_name("static")  # type: ignore[union-attr, arg-type]
"""The files of a package that is not imported, which takes 10 ms."""

ASSETS: Mapping[str, str] = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
"""The files that the page loads, with their content types."""

PAGE = b"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>trio_pool_serve</title>
<link rel="icon" href="console/icon.svg">
<link rel="stylesheet" href="docs/swagger-ui.css">
<style>.response-col_links { display: none }</style>
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script>
SwaggerUIBundle({url: "openapi.json", dom_id: "#swagger-ui", validatorUrl: null, defaultModelsExpandDepth: 0})
</script>
</body>
</html>
"""


@frozen
class Operation:
    """A route of no dialect, and an example of its response: JSON, if it has no other ``content_type``.

    ``body`` is an example of a JSON body; ``None`` if that is not described.
    """

    summary: str
    example: Any
    content_type: str = "application/json"
    body: Mapping[str, Any] | None = None


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("GET", "/v1/models"): Operation("The models of the server.", {"object": "list", "data": [{"id": "org/model"}]}),
    ("GET", "/models"): Operation("As /v1/models, for infinity's clients.", {"object": "list", "data": []}),
    ("GET", "/v1/models/{name}"): Operation("One model.", {"id": "org/model", "object": "model", "task": "embed"}),
    ("POST", "/v1/models"): Operation(
        "Load a model, with --model-api.",
        {"id": "bge", "object": "model", "state": "loaded", "memory_bytes": 300_000_000},
        body={"model": "BAAI/bge-small-en-v1.5", "name": "bge"},
    ),
    ("DELETE", "/v1/models/{name}"): Operation(
        "Unload a model, with --model-api; ?drain=1 waits for the requests that use it.",
        {"id": "bge", "object": "model", "deleted": True},
    ),
    ("POST", "/v1/load_lora_adapter"): Operation(
        "Load a LoRA adapter as vLLM does, with --model-api.",
        "Success: LoRA adapter 'legal' added successfully.",
        "text/plain",
        body={"lora_name": "legal", "lora_path": "/adapters/legal"},
    ),
    ("POST", "/v1/unload_lora_adapter"): Operation(
        "Unload a LoRA adapter as vLLM does, with --model-api.",
        "Success: LoRA adapter 'legal' removed successfully.",
        "text/plain",
        body={"lora_name": "legal"},
    ),
    ("GET", "/info"): Operation(
        "The default model, as text-embeddings-inference describes its own.", {"model_id": "org/model"}
    ),
    ("GET", "/tokenizer_info"): Operation(
        "The tokenizer's settings and the chat template.", {"tokenizer_class": "BertTokenizer"}
    ),
    ("GET", "/api/tags"): Operation("The models of the server, for Ollama's clients.", {"models": []}),
    ("GET", "/api/ps"): Operation("The loaded models, for Ollama's clients.", {"models": []}),
    ("GET", "/api/version"): Operation("As /version.", {"version": trio_pool_serve.__version__}),
    ("POST", "/api/show"): Operation(
        "One model, for Ollama's clients.",
        {"details": {}, "model_info": {"general.architecture": "bert"}, "capabilities": ["embedding"]},
        body={"model": "org/model"},
    ),
    ("POST", "/api/pull"): Operation(
        "Whether a model is served: none is downloaded.",
        {"status": "success"},
        "application/x-ndjson",
        body={"model": "org/model"},
    ),
    ("POST", "/api/generate"): Operation("Refused: the models generate no text.", {}, body={"model": "org/model"}),
    ("POST", "/api/chat"): Operation("Refused: the models generate no text.", {}, body={"model": "org/model"}),
    ("GET", "/v1/health/live"): Operation("As /livez, for NIM's clients.", {"live": True}),
    ("GET", "/v1/health/ready"): Operation("As /health, for NIM's clients.", {"ready": True}),
    ("GET", "/.well-known/live"): Operation("As /livez, for Weaviate.", ""),
    ("GET", "/.well-known/ready"): Operation("As /health, for Weaviate.", ""),
    ("GET", "/meta"): Operation("The default model, for Weaviate.", {"model": "org/model"}),
    ("GET", "/v1/cluster/auth"): Operation("Whether a key is needed, for Xinference's clients.", {"auth": False}),
    ("GET", "/v2"): Operation("The server, by the Open Inference Protocol.", {"name": "trio_pool_serve"}),
    ("GET", "/v2/health/live"): Operation("As /livez.", {"live": True}),
    ("GET", "/v2/health/ready"): Operation("As /health.", {"ready": True}),
    ("GET", "/v2/models/{name}"): Operation("A model's tensors.", {"name": "org/model", "inputs": [], "outputs": []}),
    ("GET", "/v2/models/{name}/ready"): Operation("Whether a model is loaded.", {"name": "org/model", "ready": True}),
    ("GET", "/livez"): Operation("Whether the process should be kept.", {"status": "alive"}),
    ("GET", "/health"): Operation("Whether the models are loaded and their engines alive.", {"status": "ready"}),
    ("GET", "/ping"): Operation("As /health.", {"status": "ready"}),
    ("GET", "/"): Operation("As /health, with the text that Ollama's clients look for.", RUNNING, "text/plain"),
    ("POST", "/ping"): Operation("As /health.", {"status": "ready"}),
    ("GET", "/readyz"): Operation("Whether the server accepts tasks now.", {"status": "ready"}),
    ("GET", "/metrics"): Operation(
        "Metrics in the Prometheus text format.", "trio_pool_serve_requests_total 3.0", "text/plain"
    ),
    ("GET", "/load"): Operation(
        "The current load of engines, threads, processes and the cache of images.",
        {"server_load": 0, "models": {}, "limiters": {}, "workers": {}, "media_cache": {}, "media_fetches": {}},
    ),
    ("GET", "/version"): Operation("The server's version.", {"version": trio_pool_serve.__version__}),
    ("GET", "/openapi.json"): Operation("This document.", {"openapi": "3.1.0"}),
    ("GET", "/docs"): Operation("This document as a web page.", "<!doctype html>", "text/html"),
    ("GET", "/console"): Operation(
        "A page that shows the load, and what models make of texts.", "<!doctype html>", "text/html"
    ),
    ("GET", "/console/live"): Operation(
        "The load of the last 15 minutes, and from now on each second, as server-sent events.",
        'data: {"number":1,"state":"ready"}\n\n',
        "text/event-stream",
    ),
    ("GET", "/console/models"): Operation(
        "The tasks and options of each model, for the console's forms.", [{"id": "org/model", "tasks": ["embed"]}]
    ),
    ("POST", "/v1/files"): Operation("Upload a file of requests, as multipart/form-data.", {"id": "file-0"}),
    ("GET", "/v1/files"): Operation("The files of the API key.", {"object": "list", "data": []}),
    ("GET", "/v1/files/{name}"): Operation("One file.", {"id": "file-0", "object": "file", "purpose": "batch"}),
    ("DELETE", "/v1/files/{name}"): Operation("Remove a file.", {"id": "file-0", "object": "file", "deleted": True}),
    ("GET", "/v1/files/{name}/content"): Operation("The bytes of a file.", "{}", "application/octet-stream"),
    ("POST", "/v1/batches"): Operation(
        "Create a job that computes the requests of a file.", {"id": "batch_0", "object": "batch"}
    ),
    ("GET", "/v1/batches"): Operation("The batches of the API key.", {"object": "list", "data": []}),
    ("GET", "/v1/batches/{name}"): Operation("One batch.", {"id": "batch_0", "status": "in_progress"}),
    ("POST", "/v1/batches/{name}/cancel"): Operation("Cancel a batch.", {"id": "batch_0", "status": "cancelling"}),
    ("GET", "/engine_hosts"): Operation("The engines of --engine-hosts.", {"hosts": []}),
    ("POST", "/engine_hosts"): Operation("Add a host, or use a drained one again.", {"hosts": []}),
    ("POST", "/engine_hosts/drain"): Operation("Send no more inputs to a host.", {"hosts": []}),
    ("POST", "/reset_mm_cache"): Operation("Clear the cache of prepared images.", {"status": "cleared"}),
}


@cache
def openapi_document(dialects: tuple[Dialect, ...], by_fields: PathByFields, without: frozenset[Route]) -> bytes:
    """Return the OpenAPI 3.1 document of all routes, as JSON; cached for listeners that are restarted.

    The routes ``without`` are not served.
    """
    by_path = dict(endpoints_by_path(dialects))
    by_path[by_fields.path] = [endpoint for target in by_fields.targets for endpoint in by_path[target]]
    endpoints = [candidate.endpoint for candidates in by_path.values() for candidate in candidates]
    wires, responses = [endpoint.wire for endpoint in endpoints], [endpoint.response for endpoint in endpoints]
    types = list(dict.fromkeys(filter(None, [*wires, *responses])))
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    paths = {path: {"post": _task_route(candidates, schema_of)} for path, candidates in by_path.items()}
    paths[by_fields.path]["post"] |= {"tags": ["all dialects"], "summary": by_fields.summary}
    for (method, path), operation in OPERATIONS.items():
        if (method, path) not in without:
            paths.setdefault(path, {})[method.lower()] = _operational_route(operation)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "trio_pool_serve", "version": trio_pool_serve.__version__},
            "paths": paths,
            "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
            "security": [{"key": []}, {}],
        }
    )


def _task_route(candidates: Sequence[DialectEndpoint], schema_of: Mapping[type, Any]) -> dict[str, Any]:
    endpoints = [candidate.endpoint for candidate in candidates]
    bodies = [schema_of[endpoint.wire] for endpoint in endpoints]
    repeated = len({candidate.dialect.name for candidate in candidates}) < len(candidates)
    # Swagger UI shows the first one, here that of bodies without special fields, and lists the others by their names.
    examples = {
        f"{each.dialect.name} {each.endpoint.paths[0]}" if repeated else each.dialect.name: {
            "description": each.endpoint.summary,
            "value": each.endpoint.example,
        }
        for each in sorted(candidates, key=lambda each: bool(each.endpoint.discriminators))
    }
    responses = [schema_of[endpoint.response] for endpoint in endpoints if endpoint.response is not None]
    if 0 < len(responses) < len(endpoints):
        responses.append({"description": "The response of another dialect, which is no JSON object."})
    content: dict[str, Any] = {"application/json": {"schema": {"anyOf": responses}} if responses else {}}
    content |= {kind: {} for endpoint in endpoints for kind in getattr(endpoint.wire, "OTHER_TYPES", ())}
    fingerprint = {"description": "The model's `fingerprint` in /v1/models.", "schema": {"type": "string"}}
    return {
        "tags": [candidates[-1].dialect.name],
        "summary": endpoints[-1].summary,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"anyOf": bodies}, "examples": examples}},
        },
        "responses": {
            "200": {"description": "The response.", "headers": {"Model-Fingerprint": fingerprint}, "content": content},
            "default": {"description": "An error, in the dialect's form."},
        },
    }


def _operational_route(operation: Operation) -> dict[str, Any]:
    responses = {
        "200": {"description": "The response.", "content": {operation.content_type: {"example": operation.example}}},
        "default": {"description": "An error, or a state that a probe has to notice."},
    }
    described = {"tags": ["operations"], "summary": operation.summary, "responses": responses}
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": {"type": "object"}, "example": operation.body}},
        }
    return described


def openapi_routes(dialects: tuple[Dialect, ...], by_fields: PathByFields, without: Collection[Route]) -> Routes:
    """Return the routes of the document and of the page that shows it, which loads nothing from outside.

    The arguments are the arguments of ``openapi_document``.
    """

    async def document(_: HttpRequest) -> HttpResponse:
        return HttpResponse(openapi_document(dialects, by_fields, frozenset(without)))  # takes 20 ms, the first time

    async def asset(name: str, kind: str, _: HttpRequest) -> HttpResponse:
        return HttpResponse(await trio.Path(SWAGGER_UI / name).read_bytes(), kind)

    return {
        ("GET", "/openapi.json"): document,
        ("GET", "/docs"): fixed(HttpResponse(PAGE, "text/html; charset=utf-8")),
        **{("GET", f"/docs/{name}"): partial(asset, name, kind) for name, kind in ASSETS.items()},
    }
