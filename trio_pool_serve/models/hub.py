"""Where a model's files are: a local folder, or the Hugging Face hub."""

from pathlib import Path

from trio_pool_serve.errors import ModelLoadError

NOT_SERVED = (
    "onnx/*", "openvino/*", "coreml/*", "*.onnx", "*.h5", "*.msgpack", "*.ot", "*.gguf", "*.tflite", "*.mlmodel",
)  # fmt: skip
"""Other runtimes' weights, which many repositories carry beside the ones that are loaded."""


def locate_model(model: str, *, revision: str | None = None) -> Path:
    """Return the local folder of ``model``, downloading it with progress bars if it is a hub id.

    Blocks. Raises ``ModelLoadError``, with what to do about it.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    # Imported here: a local folder needs none of it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, ignore_patterns=list(NOT_SERVED)))
    except HFValidationError as error:
        raise ModelLoadError(f"{model} is neither a folder nor the id of a hub model.") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelLoadError(f"{model} is not a folder, and the hub did not give it: {error}") from error
