"""How a folder's HierarchicalTokenPooling module pools the vectors of tokens."""

import math
from typing import Any, get_args

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.folder_files import ModuleFiles
from trio_pool_serve.models.model_kind import TokenPooling
from trio_pool_serve.prompts import InputType


def read_token_pooling(module: ModuleFiles) -> TokenPooling:
    """Return the pooling that a module declares, with sentence-transformers' defaults.

    Raises ``ModelLoadError`` for values that sentence-transformers refuses, and for unknown tasks.
    """
    config, known = module.config, get_args(InputType)
    tasks: Any = config.get("tasks", "document")
    if tasks is None or isinstance(tasks, str):
        tasks = ["document" if tasks is None else tasks]
    factor, protected = config.get("pool_factor", 1.0), config.get("num_protected_tokens", 1)
    normalizes = config.get("normalize_embeddings", False)
    accepted = {
        "pool_factor": (is_number(factor) and factor >= 1 and math.isfinite(factor), "a number of at least 1"),
        "num_protected_tokens": (type(protected) is int and protected >= 0, "an integer of at least 0"),
        "normalize_embeddings": (isinstance(normalizes, bool), "true or false"),
        "tasks": (isinstance(tasks, list) and all(task in known for task in tasks), f"a list of {' and '.join(known)}"),
    }
    for key, (is_accepted, what) in accepted.items():
        if not is_accepted:
            raise ModelLoadError(f"{module.path / 'config.json'}: {key} is {config[key]!r}; it must be {what}.")
    return TokenPooling(factor=factor, protected_tokens=protected, normalizes=normalizes, input_types=frozenset(tasks))


def is_number(value: object) -> bool:
    """Return whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)
