"""``/invocations``: SageMaker's one route for every task. A body is answered as by the route that its fields tell."""

from collections.abc import Mapping
from typing import Any

import msgspec

from trio_pool_serve.api.dialects.tei.root import MAIN_TASKS
from trio_pool_serve.api.dialects.vllm.pooling_endpoint import main_task
from trio_pool_serve.api.http.dispatch import PathByFields
from trio_pool_serve.api.http.json_body import decode_json
from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.service import Service
from trio_pool_serve.tasks.pool import TASKS

INPUT_FIELDS = ("input", "messages", "prompt_embeds")
"""A body with one of these is for the main task of its model, or the one that it names."""

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
"""Paths by the fields that other bodies have; the first whose fields are all there."""


def path_of_fields(fields: Mapping[str, msgspec.Raw], service: Service) -> str:
    """Return the path that a body with these fields is for.

    Raises ``InvalidRequestError`` for a body that is for none, ``NotFoundError`` and ``EngineLoadingError``.
    """
    fields = {name: value for name, value in fields.items() if bytes(value) != b"null"}
    if any(name in fields for name in INPUT_FIELDS):
        return _path_of_task(fields, service)
    for needed, path in PATHS:
        if needed <= fields.keys():
            return _path_of_inputs(fields, service) if path == "/" else path
    needed_fields = ", or ".join(" and ".join(sorted(needed)) for needed, _ in PATHS)
    raise InvalidRequestError(
        f"Cannot find a suitable handler for the request: it needs {', or '.join(INPUT_FIELDS)}, or {needed_fields}."
    )


def _path_of_inputs(fields: Mapping[str, msgspec.Raw], service: Service) -> str:
    """Return the path for ``inputs``: ``/``, whose answer for one text to classify is made for the hub's own client."""
    able = service.models.folder_of(_string(fields, "model")).spec.tasks
    main = next((task for task in MAIN_TASKS if task in able), None)
    return "/predict" if main == "classify" and "parameters" not in fields else "/"


def _path_of_task(fields: Mapping[str, msgspec.Raw], service: Service) -> str:
    task = _string(fields, "task")
    if "tasks" in fields:
        return "/pooling"
    if task not in TASKS:  # a task of Jina's is another thing
        task = main_task(service.models.folder_of(_string(fields, "model")))
    return {"embed": "/v1/embeddings", "classify": "/classify"}.get(task, "/pooling")


def _string(fields: Mapping[str, msgspec.Raw], name: str) -> str | None:
    value = decode_json(bytes(fields[name]), Any) if name in fields else None
    return value if isinstance(value, str) else None


INVOCATIONS = PathByFields(
    path="/invocations",
    targets=("/v1/embeddings", "/classify", "/pooling", *dict.fromkeys(path for _, path in PATHS), "/predict"),
    path_of=path_of_fields,
)
