"""The dialects of this server, one line each, and ``/invocations``, whose bodies are for paths of theirs.

A dialect is one module: the request type, response type and ``respond_…`` of each endpoint, then ``error_body`` and the
``Dialect``. If it is too long for a module, it is a folder with ``error_body`` and the ``Dialect`` in ``__init__.py``,
and the endpoints by task in ``pooling_endpoints.py``, ``scoring_endpoints.py`` and ``token_endpoints.py``.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from trio_pool_serve.api.dialects.cohere import COHERE
from trio_pool_serve.api.dialects.elasticsearch import ELASTICSEARCH
from trio_pool_serve.api.dialects.jina import JINA
from trio_pool_serve.api.dialects.nim import NIM
from trio_pool_serve.api.dialects.ollama import OLLAMA
from trio_pool_serve.api.dialects.open_inference import OPEN_INFERENCE
from trio_pool_serve.api.dialects.openai import OPENAI
from trio_pool_serve.api.dialects.tei import TEI
from trio_pool_serve.api.dialects.tei.root_endpoint import MAIN_TASKS
from trio_pool_serve.api.dialects.vllm import VLLM
from trio_pool_serve.api.dialects.vllm.pooling_endpoints import main_task
from trio_pool_serve.api.dialects.voyage import VOYAGE
from trio_pool_serve.api.dialects.weaviate import WEAVIATE
from trio_pool_serve.api.http.endpoint import Dialect
from trio_pool_serve.api.http.endpoint_choice import PathByFields
from trio_pool_serve.api.http.json_body import decode_json
from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.service import Service
from trio_pool_serve.tasks.pool import TASKS

DIALECTS: list[Dialect] = [
    OPENAI,
    VLLM,
    VOYAGE,
    JINA,
    COHERE,
    TEI,
    OLLAMA,
    NIM,
    WEAVIATE,
    ELASTICSEARCH,
    OPEN_INFERENCE,
]
"""All dialects. If the discriminators of several match a request, the first one gets it."""


INPUT_FIELDS = ("input", "messages", "prompt_embeds")
"""A body of ``/invocations`` with one of these is for the task that it names, or the main task of its model."""

PATHS: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"query", "texts"}), "/rerank"),
    (frozenset({"query", "documents"}), "/rerank"),
    (frozenset({"text_1"}), "/score"),
    (frozenset({"data_1"}), "/score"),
    (frozenset({"queries"}), "/score"),
    (frozenset({"texts"}), "/v2/embed"),
    (frozenset({"images"}), "/v2/embed"),
    (frozenset({"inputs", "embedding_types"}), "/v2/embed"),
    (frozenset({"inputs"}), "/"),
)
"""Fields and the path that a body with all of them is for, if it has no input field; the first match counts."""


def path_of_fields(fields: Mapping[str, msgspec.Raw], service: Service) -> str:
    """Return the path that a body of ``/invocations`` with these fields is for.

    Raises ``InvalidRequestError`` for a body that is for none, ``NotFoundError`` and ``EngineLoadingError``.
    """
    fields = {name: value for name, value in fields.items() if bytes(value) != b"null"}
    if any(name in fields for name in INPUT_FIELDS):
        return _path_of_task(fields, service)
    for needed, path in PATHS:
        if needed <= fields.keys():
            return _path_of_inputs(fields, service) if path == "/" else path
    choices = ", ".join([*INPUT_FIELDS, *(" + ".join(sorted(needed)) for needed, _ in PATHS)])
    raise InvalidRequestError(f"Cannot find a suitable handler for the request. Send one of: {choices}.")


def _path_of_inputs(fields: Mapping[str, msgspec.Raw], service: Service) -> str:
    """Return ``/predict`` for a classifier, unless the hub's own client sends ``parameters``; otherwise ``/``."""
    able = service.models.folder_of(_string(fields, "model")).spec.tasks
    main = next((task for task in MAIN_TASKS if task in able), None)
    return "/predict" if main == "classify" and "parameters" not in fields else "/"


def _path_of_task(fields: Mapping[str, msgspec.Raw], service: Service) -> str:
    task = _string(fields, "task")
    if "tasks" in fields:
        return "/pooling"
    if task not in TASKS:  # Jina's field of that name has other values
        task = main_task(service.models.folder_of(_string(fields, "model")))
    return {"embed": "/v1/embeddings", "classify": "/classify"}.get(task, "/pooling")


def _string(fields: Mapping[str, msgspec.Raw], name: str) -> str | None:
    value = decode_json(bytes(fields[name]), Any) if name in fields else None
    return value if isinstance(value, str) else None


INVOCATIONS = PathByFields(
    path="/invocations",
    targets=("/v1/embeddings", "/classify", "/pooling", *dict.fromkeys(path for _, path in PATHS), "/predict"),
    path_of=path_of_fields,
    summary="As the route that the body's fields are for.",
)
"""SageMaker's one route for every task."""
