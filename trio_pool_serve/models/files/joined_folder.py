"""A LoRA adapter's folder and its base model's, joined into one folder of links.

Whatever reads, converts or identifies a model then finds all of its files in one place. Of files that both folders
have, the adapter's count, as in PEFT and sentence-transformers.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.adapter_files import ADAPTER_CONFIG, WEIGHTS, read_adapter_config
from trio_pool_serve.models.files.folder_files import FolderFiles, read_folder_files, require_regular_files
from trio_pool_serve.models.files.model_digest import files_of_model
from trio_pool_serve.models.files.safetensors_files import read_shapes

ADAPTER = "adapter_to_merge"
"""The adapter's folder in a joined one. Not at its top, where transformers would apply it, with peft."""

OF_ADAPTER = re.compile(r"adapter_(config|model)\..*")
OF_TOKENIZER = re.compile(
    r"(tokenizer|vocab|merges|special_tokens|added_tokens|spiece|spm|sentencepiece|chat_template).*"
)
VOCABULARY = re.compile(r"tokenizer\.(json|model)|(vocab|spiece|spm|sentencepiece).*")
OF_MODULES = re.compile(r"modules\.json|config_sentence_transformers\.json|sentence_.+_config\.json")
TOP = "config_sentence_transformers.json"
MAX_LABELS = 2**20
HEAD = re.compile(r"(.+\.)?(score|classifier|classifier\.out_proj)\.weight")

Files: TypeAlias = dict[str, Path | str]
"""Files by their paths in a folder: the target of a link, or the text of a new file."""

_temporary: dict[str, "tempfile.TemporaryDirectory[str]"] = {}
"""Folders that no cache keeps, until this process ends."""


def adapter_in(folder: Path) -> Path | None:
    """Return the folder of the adapter that a joined folder has; ``None`` for other folders."""
    return folder / ADAPTER if (folder / ADAPTER / ADAPTER_CONFIG).is_file() else None


def join_folders(adapter: Path, base: Path, cache: Path | None) -> Path:
    """Return a folder with the files of both, in ``cache``, or a temporary one if that cannot be written.

    ``base`` may be ``adapter``: a folder with a model and an adapter. Blocks for milliseconds. Raises
    ``ModelLoadError`` if the base is no model, and ``OSError``.
    """
    require_regular_files(adapter)
    own = {name: path for name, path in files_of_model(adapter).items() if not OF_ADAPTER.fullmatch(name)}
    files: Files = {**own} if base == adapter else _joined(own, adapter, read_folder_files(base))
    files |= {f"{ADAPTER}/{path.name}": path for path in adapter.glob("adapter_*") if OF_ADAPTER.fullmatch(path.name)}
    texts = {name: str(file.absolute()) if isinstance(file, Path) else file for name, file in files.items()}
    key = sha256(json.dumps(texts).encode()).hexdigest()[:16]
    if cache is not None:
        with suppress(OSError):
            return _written(cache / "adapters" / key / adapter.name, files)
    if key not in _temporary:
        _temporary[key] = tempfile.TemporaryDirectory(prefix="trio-pool-serve-")
    return _written(Path(_temporary[key].name) / adapter.name, files)


def _joined(own: Mapping[str, Path], adapter: Path, base: FolderFiles) -> Files:
    """Return the adapter's ``own`` files but for its weights, and the base's that they do not replace."""
    where = PurePosixPath(base.transformer_path.resolve().relative_to(base.path.resolve()))
    has_modules = "modules.json" in own
    replaced = {OF_TOKENIZER: any(map(VOCABULARY.fullmatch, own)), OF_MODULES: has_modules}
    theirs: Files = {
        name: path
        for name, path in files_of_model(base.path).items()
        if not any(is_own and of.fullmatch(PurePosixPath(name).name) for of, is_own in replaced.items())
    }
    if has_modules:  # which put the transformer at the top
        theirs = {
            PurePosixPath(name).name: path for name, path in theirs.items() if PurePosixPath(name).parent == where
        }
        where = PurePosixPath()
    files = {**theirs, **{name if name == TOP else str(where / name): path for name, path in own.items()}}
    if "config.json" not in own and (labels := _labels_of_head(adapter)):
        files[str(where / "config.json")] = json.dumps(_config_of_classifier(base, adapter, labels))
    return files


def _labels_of_head(adapter: Path) -> int:
    """Return the number of labels of the classifier that an adapter has; 0 if it has none."""
    with suppress(ModelLoadError):  # loading it reports what is wrong
        shapes = [shape for name, shape in read_shapes(adapter / WEIGHTS).items() if HEAD.fullmatch(name)]
        return int(shapes[-1][0]) if shapes and all(shapes[-1]) and shapes[-1][0] <= MAX_LABELS else 0
    return 0


def _config_of_classifier(base: FolderFiles, adapter: Path, labels: int) -> Mapping[str, Any]:
    """Return ``config.json`` of a base with a classifier of that many labels, by PEFT's task type."""
    of_tokens = read_adapter_config(adapter).get("task_type") == "TOKEN_CLS"
    name = re.sub(r"(For[A-Z]\w*|Model)?$", "", (*base.architectures, "")[0], count=1)
    config = {**base.config, "architectures": [f"{name}For{'Token' if of_tokens else 'Sequence'}Classification"]}
    if len(base.config.get("id2label") or ()) != labels:
        config |= {"id2label": {str(n): f"LABEL_{n}" for n in range(labels)}, "label2id": None, "num_labels": labels}
    return config


def _written(folder: Path, files: Files) -> Path:
    """Write a folder unless it is there; it is complete or does not exist. Raises ``OSError``."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix="."))
        for name, file in files.items():
            (path := unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file) if isinstance(file, str) else path.symlink_to(file.absolute())
        with suppress(OSError):  # another process was faster
            unfinished.rename(folder)
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
