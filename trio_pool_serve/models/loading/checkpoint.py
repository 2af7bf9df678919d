"""Loading a transformers checkpoint onto a device."""

from collections.abc import Collection
from typing import Any

import transformers
from torch import nn

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.loading.stored_weights import require_finite
from trio_pool_serve.models.loading.synchronisations import replace_synchronisations
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.runner.loaded_model import LoadingParams

ENCODER_CLASSES = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}
"""Classes for encoder–decoders of which sentence-transformers uses only the encoder, by model type."""


def load_checkpoint(
    folder: AnyModelFolder,
    params: LoadingParams,
    *,
    auto_class: str = "AutoModel",
    optional_weights: Collection[str] = ("pooler.",),
) -> nn.Module:
    """Return the transformer of a folder, loaded by one of transformers' auto classes.

    ``optional_weights`` are name prefixes of weights that the checkpoint may lack because they are not used. Raises
    ``ModelLoadError`` if any other weight is missing; transformers would initialise it at random.
    """
    if not any(path.suffix in (".safetensors", ".bin") for path in folder.transformer_path.iterdir()):
        raise ModelLoadError(f"{folder.transformer_path} holds no weights.")
    if auto_class == "AutoModel":
        auto_class = ENCODER_CLASSES.get(folder.model_type, auto_class)
    model_class: Any = getattr(transformers, auto_class)
    options: dict[str, Any] = {"trust_remote_code": True} if params.trust_remote_code else {}
    try:
        model, info = model_class.from_pretrained(
            folder.transformer_path, dtype=params.dtype, local_files_only=True, output_loading_info=True, **options
        )
    except Exception as error:
        raise ModelLoadError(f"transformers cannot load {folder.transformer_path}: {error}") from error
    missing = sorted(key for key in info["missing_keys"] if not key.startswith(tuple(optional_weights)))
    if missing:
        raise ModelLoadError(f"The checkpoint lacks {len(missing)} weights, {missing[0]} among them.")
    if model.config.is_encoder_decoder and folder.model_type not in ENCODER_CLASSES:
        raise ModelLoadError(f"{folder.model_type} is an encoder–decoder, which is not supported.")
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, "use_cache"):
            config.use_cache = False
    assert isinstance(model, nn.Module)  # noqa: S101
    if params.device.type != "cpu":
        replace_synchronisations(model)
    require_finite(model.to(params.device).named_parameters(), folder.transformer_path)
    return model.eval()
