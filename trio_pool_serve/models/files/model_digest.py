"""Whether two machines have the same model: digests of its files, and of the settings that change its outputs."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.config.pooler_config import pooler_config_of
from trio_pool_serve.types import ModelDigest

SMALL_FILES = (".json", ".txt", ".model", ".jinja")
WEIGHTS = (".safetensors", ".bin", ".pt")

NOT_OF_THE_MODEL = frozenset({"onnx", "openvino", "coreml"})
"""Folders with weights of other runtimes, which not every machine has."""

SAMPLES = 16
SAMPLE_BYTES = 64 * 1024
"""Of a file of weights that many pieces are read, evenly spaced: all of them would take minutes, and training changes
nearly every number."""

SETTINGS = ("pooling", "normalize", "task")


def digest_of(folder: Path, config: ModelConfig) -> ModelDigest:
    """Return the digest of a model's folder, computed with the settings of ``config``.

    Blocks for as long as it takes to read the tokenizer's files, and about a MiB of each file of weights. Raises
    ``OSError``.
    """
    pooler = pooler_config_of(config)
    settings = [*(getattr(config, name) for name in SETTINGS), pooler.step_tag_id, pooler.returned_token_ids]
    files = hashlib.sha256(json.dumps(settings).encode())
    weights = hashlib.sha256()
    has_weights = False
    for path in _files_of(folder):
        name = str(path.relative_to(folder)).encode()
        if path.suffix in WEIGHTS:
            has_weights = True
            weights.update(name + b"\0")
            for piece in _samples(path):
                weights.update(piece)
        elif path.suffix in SMALL_FILES and not path.name.endswith(".index.json"):
            files.update(name + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return ModelDigest(files.hexdigest(), weights.hexdigest() if has_weights else "")


def _files_of(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part in NOT_OF_THE_MODEL or part.startswith(".") for part in parts):
            yield path


def _samples(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    yield size.to_bytes(8, "little")
    with path.open("rb") as file:
        for index in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * index // (SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)
