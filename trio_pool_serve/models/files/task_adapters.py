"""LoRA adapters in a model's own folder, one for each task that it was trained for."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from trio_pool_serve.errors import require
from trio_pool_serve.models.files.adapter_files import ADAPTER_CONFIG
from trio_pool_serve.models.files.joined_folder import ADAPTER

T = TypeVar("T")

LAYOUTS = {"jina_embeddings_v3": "*"}
"""Patterns of the adapters' folders, by model type; ``adapters/*`` for all others."""

PROMPTS: Mapping[str, Mapping[str, str]] = {
    "jina_embeddings_v3": {
        "query": "Represent the query for retrieving evidence documents: ",
        "document": "Represent the document for retrieval: ",
    },
}
"""The prompts of the models' cards, by model type, for folders whose files have none."""

SIDES: Mapping[str | None, str] = {"query": "retrieval.query", "document": "retrieval.passage"}
"""The task of each input type."""


def read_task_adapters(folder: Path, config: Mapping[str, Any], wanted: Collection[str] = ()) -> Mapping[str, Path]:
    """Return the folders of the adapters that a model's folder has of its own, by task.

    Raises ``ModelLoadError`` if two are for one task, or if there is none for a task that is ``wanted``.
    """
    places = folder.glob(f"{LAYOUTS.get(str(config.get('model_type')), 'adapters/*')}/{ADAPTER_CONFIG}")
    folders = [place.parent for place in sorted(places) if place.parent.name != ADAPTER]
    found = {_task_of(path.name): path for path in folders}
    require(
        len(found) == len(folders), f"{folder} contains two adapters for one task: {[path.name for path in folders]}."
    )
    missing = ", ".join(task for task in wanted if task not in found)
    require(not missing, f"{folder} lacks adapters for tasks of config.json: {missing}.")
    return found


def of_task(adapters: Mapping[str, T], task: str | None) -> T | None:
    """Return the adapter of a task; for a side of a search that has none, the one of ``retrieval``."""
    if task is None:
        return None
    return adapters.get(task) or (adapters.get("retrieval") if task in SIDES.values() else None)


def _task_of(name: str) -> str:
    """Return a folder's task, as Jina's API names it."""
    task = name.lower().replace("_", "-")
    return next((side for side in SIDES.values() if side.replace(".", "-") == task), task)
