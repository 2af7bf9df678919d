"""Loading a transformers checkpoint onto a device."""

import os
from collections.abc import Callable, Collection
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import masking_utils
from transformers.models.deberta_v2 import modeling_deberta_v2

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.loading.stored_weights import require_finite
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
    return model.eval().requires_grad_(requires_grad=False)


def replace_synchronisations(model: nn.Module) -> None:
    """Replace parts of transformers that wait for a GPU by ones that compute the same and do not, in this process.

    Each makes a tensor of one number on the host and copies it to the device, for which the host waits until everything
    that was launched before is done. Arithmetic takes such a tensor from the host as it is.
    """
    # Whether images fit their placeholders, transformers would ask the device; the image formats have made sure of it.
    os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"
    masking_utils.or_masks = or_masks
    if getattr(model.config, "model_type", None) == "deberta-v2":
        modeling_deberta_v2.make_log_bucket_position = log_bucket_position


def or_masks(*mask_functions: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the union of mask functions, as transformers' function of this name; Gemma 3 passes a constant."""

    def union(*indices: Any) -> Tensor:
        made = mask_functions[0](*indices)
        for function in mask_functions[1:]:
            made = made | function(*indices)
        return made

    return union


def log_bucket_position(relative_pos: Tensor, bucket_size: int, max_position: int) -> Tensor:
    """Map distances to buckets: each its own up to half of ``bucket_size``, logarithmic beyond.

    He et al., https://arxiv.org/abs/2006.03654, and T5's buckets of relative positions, as DeBERTa V2 has them.
    """
    middle = bucket_size // 2
    distance = relative_pos.abs().clamp(min=middle - 1)
    half, longest = torch.tensor([middle, (max_position - 1) / middle], dtype=torch.float32)
    octaves = torch.log(distance / half) / torch.log(longest)
    far = torch.ceil(octaves * (middle - 1)) + middle
    return torch.where(distance <= middle, relative_pos.to(far.dtype), far * torch.sign(relative_pos))
