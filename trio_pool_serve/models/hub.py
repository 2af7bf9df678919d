"""Locating a model's files: a local folder, or a download from the Hugging Face hub."""

from pathlib import Path

from trio_pool_serve.errors import ModelLoadError

IGNORED_FILES = (
    "onnx/*", "openvino/*", "coreml/*", "*.onnx", "*.h5", "*.msgpack", "*.ot", "*.gguf", "*.tflite", "*.mlmodel",
)  # fmt: skip
"""Other runtimes' weights, which many repositories carry in addition to the ones that are loaded."""


def locate_model(model: str, *, revision: str | None = None) -> Path:
    """Return the local folder of ``model``, downloading it with progress bars if it is a hub id.

    Blocks. Raises ``ModelLoadError``.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    # Imported here: a local folder does not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, ignore_patterns=list(IGNORED_FILES)))
    except HFValidationError as error:
        raise ModelLoadError(f"{model} is neither a folder nor the id of a hub model.") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelLoadError(f"{model} is not a folder, and cannot be downloaded from the hub: {error}") from error
