"""The JSON files and the modules of a model's folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from trio_pool_serve.errors import ModelLoadError


@frozen(kw_only=True)
class ModuleFiles:
    """One entry of ``modules.json``: its class name, its folder and its config."""

    name: str
    path: Path
    config: Mapping[str, Any]


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file, ``{}`` if there is no such file. Raises ``ModelLoadError``."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object.")
    return document


def read_modules(path: Path) -> tuple[ModuleFiles, ...]:
    """Return the modules of a sentence-transformers folder, none for a bare transformer."""
    listing = path / "modules.json"
    if not listing.is_file():
        return ()
    try:
        entries = json.loads(listing.read_text(encoding="utf-8"))
        modules = tuple(_module_files(path, entry["type"], entry["path"]) for entry in entries)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{listing} cannot be read: {error!r}") from error
    if not modules or modules[0].name != "Transformer":
        raise ModelLoadError(f"{listing} does not begin with a Transformer module.")
    return modules


def _module_files(root: Path, dotted: str, subfolder: str) -> ModuleFiles:
    package, _, name = dotted.rpartition(".")
    if package.partition(".")[0] != "sentence_transformers":
        raise ModelLoadError(f"The module {dotted} is not one of sentence-transformers' own and cannot be loaded.")
    path = (root / subfolder).resolve()
    if not path.is_relative_to(root.resolve()):
        raise ModelLoadError(f"modules.json points outside the model's folder: {subfolder}")
    config = read_json(path / "config.json") if name != "Transformer" else {}
    return ModuleFiles(name=name, path=path, config=config)
