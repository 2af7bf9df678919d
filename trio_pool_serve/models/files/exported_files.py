"""OpenVINO and ONNX files in a model's folder, which Optimum or sentence-transformers exported."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

from trio_pool_serve.models.files.adapter_files import WEIGHTS

FILES = ("openvino/openvino_model.xml", "openvino_model.xml", "onnx/model.onnx", "model.onnx")

INT8_FILES = ("openvino/openvino_model_qint8_quantized.xml", "openvino_model_qint8_quantized.xml")

TORCH_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")


def exported_file(transformer_path: Path, *, in_int8: bool = False) -> Path | None:
    """Return the exported file in a transformer's folder; ``None`` if there is none."""
    files = (transformer_path / name for name in (INT8_FILES if in_int8 else FILES))
    return next(filter(Path.is_file, files), None)


def parts_of(file: Path) -> list[Path]:
    """Return an exported file and the files beside it that may contain its weights."""
    return sorted(path for path in file.parent.glob(f"{file.stem}.*") if path.is_file())


def missing_libraries() -> str:
    """Return a reason that names which of torch and transformers are not installed; empty if both are."""
    # ``find_spec`` finds no torch in a process that blocks its import (``forbid_torch``).
    missing = [library for library in ("torch", "transformers") if PathFinder.find_spec(library, sys.path) is None]
    return f"{' and '.join(missing)} cannot be imported" if missing else ""


def why_not_torch(transformer_path: Path) -> str:
    """Return why torch cannot load a model; empty if it may."""
    no_weights = (
        ""
        if has_torch_weights(transformer_path) or not has_exported_file(transformer_path)
        else "the folder contains no weights for torch"
    )
    return missing_libraries() or no_weights


def has_torch_weights(transformer_path: Path) -> bool:
    """Return whether there are weights that torch can load; an adapter's do not count."""
    found = (path.name for pattern in TORCH_WEIGHTS for path in transformer_path.glob(pattern))
    return any(name != WEIGHTS for name in found)


def has_exported_file(transformer_path: Path) -> bool:
    """Return whether there is an exported file, in int8 or not."""
    return any((transformer_path / name).is_file() for name in (*FILES, *INT8_FILES))
