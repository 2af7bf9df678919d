"""From a model's folder to a runner."""

from typing import Any

import torch
import transformers
from torch import nn

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.model_folder import ModelFolder
from trio_pool_serve.offload import Offload
from trio_pool_serve.runner.dtype import resolve_device, resolve_dtype
from trio_pool_serve.runner.output_copy import CudaCopyBackend, OutputCopier
from trio_pool_serve.runner.pooler import Pooler
from trio_pool_serve.runner.transformer_runner import TransformerRunner

ENCODERS_OF = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}
"""Encoder–decoders of which sentence-transformers uses the encoder alone."""


def load_runner(folder: ModelFolder, config: ModelConfig, offload: Offload) -> TransformerRunner:
    """Load a model and compute one batch with it, so that the first request finds everything warm.

    Blocks for seconds. Raises ``ModelLoadError`` with a message for people.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    pooler = Pooler(folder.heads).to(device).eval()
    model = _load_model(folder, dtype, trust_remote_code=config.trust_remote_code).to(device).eval()
    runner = TransformerRunner(
        model,
        pooler,
        device,
        # Any id will do behind the mask; some configs have none, or −1.
        pad_token_id=max(0, folder.transformer_config.get("pad_token_id") or 0),
        copier=OutputCopier(CudaCopyBackend(device), offload) if device.type == "cuda" else None,
    )
    try:
        runner.warm_up()
    except Exception as error:
        raise ModelLoadError(f"The model is loaded, but cannot compute its first batch: {error}") from error
    parameters = sum(parameter.numel() for parameter in model.parameters())
    runner.description = (
        f"{folder.model_type}, {parameters / 1e6:.1f} M parameters, {str(dtype).removeprefix('torch.')} on {device}, "
        f"{'+'.join(pooler.pooling)} pooling, {runner.dimensions} dimensions, {folder.max_model_len} tokens"
    )
    return runner


def _load_model(folder: ModelFolder, dtype: torch.dtype, *, trust_remote_code: bool) -> nn.Module:
    if not any(path.suffix in (".safetensors", ".bin") for path in folder.transformer_path.iterdir()):
        raise ModelLoadError(f"{folder.transformer_path} holds no weights.")
    loader: Any = getattr(transformers, ENCODERS_OF.get(folder.model_type, "AutoModel"))
    options: dict[str, Any] = {"trust_remote_code": True} if trust_remote_code else {}
    try:
        model, info = loader.from_pretrained(
            folder.transformer_path, dtype=dtype, local_files_only=True, output_loading_info=True, **options
        )
    except Exception as error:
        raise ModelLoadError(f"transformers cannot load {folder.transformer_path}: {error}") from error
    # transformers fills what a checkpoint lacks with random numbers. Only its own pooler, which is not
    # used here, may be missing.
    missing = sorted(key for key in info["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise ModelLoadError(f"The checkpoint lacks {len(missing)} weights, {missing[0]} among them.")
    if model.config.is_encoder_decoder and folder.model_type not in ENCODERS_OF:
        raise ModelLoadError(f"{folder.model_type} is an encoder–decoder, which is not supported.")
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    assert isinstance(model, nn.Module)  # noqa: S101
    return model
