"""Digests of a model's content, which do not depend on the name and place of its folder.

``model_entry`` finds conversions of the same files; by ``digest_of`` two machines find out whether they have the same
model. Without a cache, which remembers the digests of unchanged files, both read all files: a second for a gigabyte.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.config.pooler_config import pooler_config_of
from trio_pool_serve.errors import require
from trio_pool_serve.storage.file_digests import ModelDigest, file_digests
from trio_pool_serve.storage.model_cache import CacheEntry, ModelCache

SMALL_FILES = (".json", ".txt", ".model", ".metadata", ".jinja", ".py", ".bpe", ".codes", ".spm", ".tiktoken", ".vocab")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")

NOT_OF_THE_MODEL = frozenset({
    "onnx", "openvino", "coreml", "optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin",
})  # fmt: skip
"""Folders with weights of other runtimes, which some machines lack, and files that training writes."""


def model_entry(
    folder: Path, cache: ModelCache, *kind: str, suffixes: tuple[str, ...] = (*SMALL_FILES, *WEIGHTS), part: str = ""
) -> CacheEntry:
    """Return the cache's entry of a model's content and a kind of conversion; its name for people ends in ``part``.

    The content is all files with these suffixes that affect the output, and their names in the folder. Blocks. Raises
    ``OSError``.
    """
    is_of_hub = folder.parent.name == "snapshots"  # .../models--OWNER--NAME/snapshots/REVISION
    name = folder.parent.parent.name.removeprefix("models--") if is_of_hub else folder.resolve().name
    return cache.entry(f"{name}{part}", _digest(_content_of(folder, cache, suffixes)), *kind)


def digest_of(folder: Path, config: ModelConfig) -> ModelDigest:
    """Return the digest of a model's folder, computed with the settings of ``config``. Blocks. Raises ``OSError``."""
    pooler = pooler_config_of(config)
    settings = [config.pooling, config.normalize, config.task, pooler.step_tag_id, pooler.returned_token_ids]
    content = _content_of(folder, ModelCache.of(config.cache_dir))
    weights = {name: digest for name, digest in content.items() if name.endswith((*WEIGHTS, ".index.json"))}
    files = _digest([settings, {name: digest for name, digest in content.items() if name not in weights}])
    return ModelDigest(files, _digest(weights) if any(name.endswith(WEIGHTS) for name in weights) else "")


def fingerprint_of_loaded(
    folder: Path, config: ModelConfig, exported: Iterable[Path], *computed_by: str, as_read: Mapping[str, object]
) -> str:
    """Return the fingerprint of a model's outputs for token ids. Blocks.

    ``exported`` are the files that its weights were taken from, if torch does not load it. Empty if files cannot be
    read, or have changed since ``as_read``, their ``file_states`` before the model was loaded. Raises
    ``ModelLoadError`` if weights have changed: parts of both files may have been loaded.
    """
    cache = ModelCache.of(config.cache_dir)
    with suppress(OSError):  # loading the model does not read all files
        weights = file_digests(exported, None if cache is None else cache.memory)
        fingerprint = fingerprint_of(*digest_of(folder, config), *weights.values(), *computed_by)
        states = file_states(folder, exported)
        is_same = all(states.get(name) == state for name, state in as_read.items() if name.endswith(WEIGHTS))
        require(is_same, f"The weights in {folder} changed while they were loaded; load them once they are complete.")
        return fingerprint if states == as_read else ""
    return ""


def file_states(folder: Path, exported: Iterable[Path] = ()) -> Mapping[str, object]:
    """Return the size, the time of modification and the inode of each file of a model, and of ``exported`` ones.

    Replacing a file changes them; another link to it, or other permissions, do not. Raises ``OSError``.
    """
    paths = {**files_of_model(folder), **{str(path): path for path in exported}}
    statuses = {name: path.stat() for name, path in paths.items()}
    return {name: (status.st_size, status.st_mtime_ns, status.st_ino) for name, status in statuses.items()}


def fingerprint_of(*parts: object) -> str:
    """Return 16 hexadecimal digits that differ if any of ``parts``, which must be JSON values, differs."""
    return _digest(parts)[:16]


def files_of_model(folder: Path, suffixes: tuple[str, ...] = (*SMALL_FILES, *WEIGHTS)) -> dict[str, Path]:
    """Return the files of a model that affect its outputs, by their paths in the folder and sorted by them."""
    names = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name.as_posix(): path
        for name, path in names.items()
        if path.suffix in suffixes
        and not any(part in NOT_OF_THE_MODEL or part.startswith((".", "checkpoint-")) for part in name.parts)
    }


def _content_of(
    folder: Path, cache: ModelCache | None, suffixes: tuple[str, ...] = (*SMALL_FILES, *WEIGHTS)
) -> Mapping[str, str]:
    """Return the SHA-256 of each file of a model, by its path in the folder and sorted by it."""
    paths = files_of_model(folder, suffixes)
    digests = file_digests(paths.values(), None if cache is None else cache.memory)
    return {name: digests[path] for name, path in paths.items()}


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
