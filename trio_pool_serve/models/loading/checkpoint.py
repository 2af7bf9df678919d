"""Loading a transformers checkpoint onto a device: whole models, their logits of a few tokens, and single weights."""

import logging
import operator
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import masking_utils, modeling_utils
from transformers.models.auto.auto_factory import _get_model_class
from transformers.models.deberta_v2 import modeling_deberta_v2

from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.models.files.adapter_files import read_adapter
from trio_pool_serve.models.files.folder_files import read_json
from trio_pool_serve.models.files.joined_folder import adapter_in
from trio_pool_serve.models.files.quantized_files import Quantization
from trio_pool_serve.models.files.safetensors_files import unreadable
from trio_pool_serve.models.loading.adapter_merging import merge_adapter
from trio_pool_serve.models.loading.architectures import ENCODER_CLASSES, OF_CODE, require_supported_type
from trio_pool_serve.models.loading.dequantizing import dequantize
from trio_pool_serve.models.loading.surplus_weights import require_used
from trio_pool_serve.models.loading.tokenizer_loading import native_options
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.runner.heads.classification import SelectedLogits
from trio_pool_serve.runner.loaded_model import Backbone, LoadingParams

logger = logging.getLogger(__name__)

FLOAT16_OVERFLOWS = frozenset({"gemma2", "gemma3", "gemma3_text", "embedding_gemma2", "embedding_gemma2_text"})
"""Model types whose states exceed the range of float16, by their model cards and vLLM."""

PROBE_TOKENS = 8
PROBE_LOGITS = 64

TOLERANCE = 0.03
"""Relative. bfloat16 rounding errors are a tenth of that; models that scale their logits deviate by more."""


def load_checkpoint(
    folder: AnyModelFolder,
    params: LoadingParams,
    *,
    auto_class: str = "AutoModel",
    optional_weights: Collection[str] = ("pooler.",),
    others: Collection[str] = (),
) -> nn.Module:
    """Return the transformer of a folder, loaded by one of transformers' auto classes.

    ``optional_weights`` are name prefixes of weights that are not used, so the checkpoint may lack them; ``others`` are
    weights that the caller reads itself. Raises ``ModelLoadError`` if any other weight is missing, which transformers
    would initialise at random, or if the checkpoint has other weights, which it would ignore.
    """
    if not params.trust_remote_code and folder.native_config is None:
        path = folder.transformer_path / "config.json"
        require_supported_type(str(path), read_json(path))
    require(
        any(path.suffix in (".safetensors", ".bin") for path in folder.transformer_path.iterdir()),
        f"{folder.transformer_path} contains no weights.",
    )
    if auto_class == "AutoModel":
        auto_class = ENCODER_CLASSES.get(folder.model_type, auto_class)
    require(
        params.dtype != torch.float16 or folder.model_type not in FLOAT16_OVERFLOWS,
        f"--dtype float16: states of {folder.model_type} exceed its range; use bfloat16, float32 or auto.",
    )
    # Not left to the default: transformers would ask on the terminal.
    options: dict[str, Any] = {"trust_remote_code": params.trust_remote_code}
    try:
        options |= native_options(folder)
        options |= {"pretrained_model_name_or_path": folder.transformer_path, "local_files_only": True}
        model_class: Any = getattr(transformers, auto_class)
        if folder.quantization is not None:
            model_class, options = _dequantized(folder, folder.quantization, params, model_class, options)
        model, info = model_class.from_pretrained(dtype=params.dtype, output_loading_info=True, **options)
    except ModelLoadError:
        raise
    except Exception as error:
        unread = [path for path in folder.transformer_path.glob("*.bin") if not is_zipfile(path)]
        if unread and str(error).startswith("PytorchStreamReader"):
            raise unreadable(unread[0], error) from error
        raise ModelLoadError(f"transformers cannot load {folder.transformer_path}: {error}") from error
    adapter = adapter_in(folder.path)
    given = set() if adapter is None else merge_adapter(model, read_adapter(adapter), optional_weights)
    missing = sorted(key for key in {*info["missing_keys"]} - given if not key.startswith(tuple(optional_weights)))
    if missing:
        raise ModelLoadError(f"The checkpoint lacks {len(missing)} weights, {missing[0]} among them.")
    if type(model).__module__.startswith("transformers."):
        require_used({*info["unexpected_keys"]} - {*others}, folder.transformer_path, model)
    require(
        folder.model_type in ENCODER_CLASSES or not model.config.is_encoder_decoder,
        f"{folder.model_type} is an encoder–decoder, which is not supported.",
    )
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, "use_cache"):
            config.use_cache = False
    assert isinstance(model, nn.Module)  # noqa: S101
    if params.device.type != "cpu":
        replace_synchronisations(model)
    require_finite(model.to(params.device).named_parameters(), folder.transformer_path)
    return model.eval().requires_grad_(requires_grad=False)


def open_to_read(file: Path | str, framework: str, device: str = "cpu", **_: object) -> Any:
    """Open a safetensors file as ``safe_open`` does, with tensors that are read and not mapped.

    What is mapped changes with the file; if the file is cut short, the next access to a tensor ends the process.
    """
    try:
        return safe_open(file, framework, device, backend="pread")
    except Exception as error:
        raise unreadable(Path(file), error) from error


# transformers would map safetensors files, and pickles in zip files.
vars(modeling_utils).update(safe_open=open_to_read, is_zipfile=lambda _: False)


def _dequantized(
    folder: AnyModelFolder,
    quantization: Quantization,
    params: LoadingParams,
    auto_class: Any,
    options: Mapping[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Return the class of a model, and its ``from_pretrained`` arguments for weights that are dequantised here."""
    logger.info("%s: weights in %s are dequantised to %s", folder.path.name, quantization.name, params.dtype)
    config: Any = options.get("config") or transformers.AutoConfig.from_pretrained(**options)
    for part in (config, config.get_text_config()):
        vars(part).pop("quantization_config", None)
    # Auto classes need files to load from.
    mapping = getattr(auto_class, "_model_mapping", None)
    model_class: Any = auto_class if mapping is None else _get_model_class(config, mapping)  # type: ignore[no-untyped-call]
    if model_class.config_class is type(config.get_text_config()):
        config = config.get_text_config()
    weights = dequantize(read_weights(folder.transformer_path), quantization, params.dtype)
    return model_class, {"pretrained_model_name_or_path": None, "config": config, "state_dict": weights}


def require_own_class(folder: AnyModelFolder, params: LoadingParams) -> None:
    """Raise ``ModelLoadError`` for weights of a class that only the repository's own code has.

    transformers' class of the same model type may have the same weights, and compute something else with them.
    """
    config = {} if params.trust_remote_code else folder.transformer_config
    names = config.get("architectures") or ()
    require(
        "AutoModel" not in (config.get("auto_map") or {}) or any(hasattr(transformers, name) for name in names),
        f"{folder.transformer_path / 'config.json'}: architectures is {', '.join(names) or 'missing'}, which "
        f"transformers does not have: {OF_CODE}.",
    )


def load_selected_logits(
    folder: AnyModelFolder, params: LoadingParams, token_ids: Sequence[int]
) -> tuple[Backbone, SelectedLogits]:
    """Return the model without its language model head, and a module that maps its states to ``token_ids``' logits.

    Raises ``ModelLoadError``, also for a model that transforms its logits other than by softcapping.
    """
    model: Any = load_checkpoint(folder, params, auto_class="AutoModelForCausalLM", optional_weights=())
    head = model.get_output_embeddings()
    require(isinstance(head, nn.Linear), f"{folder.model_type} has no linear language model head.")
    if outside := [token_id for token_id in token_ids if token_id >= head.out_features]:
        raise ModelLoadError(f"Token {outside[0]} is outside the {head.out_features} logits of the model.")
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    _require_plain_logits(model, head, softcap)
    return Backbone(model.base_model), SelectedLogits(head, token_ids, softcap)


@torch.inference_mode()
def _require_plain_logits(model: Any, head: nn.Linear, softcap: float | None) -> None:
    """Raise ``ModelLoadError`` unless some tokens' logits equal the model's own."""
    token_ids = range(0, head.out_features, max(1, head.out_features // PROBE_LOGITS))
    ids = torch.arange(1, PROBE_TOKENS + 1, device=head.weight.device)[None]
    expected = model(input_ids=ids).logits[..., list(token_ids)].float()
    ours = SelectedLogits(head, token_ids, softcap)(model.base_model(input_ids=ids).last_hidden_state.float())
    require(
        not (ours - expected).norm() > TOLERANCE * expected.norm(),
        f"{model.config.model_type} transforms its logits in a way that is not supported: the logits of single "
        "tokens cannot be computed from its states.",
    )


def read_weights(folder: Path, prefix: str = "") -> dict[str, Tensor]:
    """Return the weights whose names begin with ``prefix``, without it. Raises ``ModelLoadError``."""
    files = _files(folder, prefix)
    weights: dict[str, Tensor] = {}
    try:
        for path in files:
            if path.suffix == ".safetensors":
                file = open_to_read(path, "pt")
                weights |= {name: file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118
            else:
                stored = torch.load(path, map_location="cpu", weights_only=True)
                weights |= {name: weight for name, weight in stored.items() if name.startswith(prefix)}
    except Exception as error:
        raise unreadable(path, error) from error
    require_finite(weights.items(), folder)
    return {name.removeprefix(prefix): weight for name, weight in weights.items()}


def require_finite(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Raise ``ModelLoadError`` with the name of the first tensor with infinities or NaN; FP8 is not checked."""
    for name, tensor in tensors:
        is_float = tensor.is_floating_point() and tensor.itemsize > 1
        require(
            not is_float or not tensor.numel() or all(bound.isfinite() for bound in tensor.aminmax()),
            f"{name} in {folder} contains infinities or NaN ({tensor.dtype}).",
        )


def _files(folder: Path, prefix: str) -> list[Path]:
    for stem in ("model.safetensors", "pytorch_model.bin"):
        shards: Mapping[str, str] = read_json(folder / f"{stem}.index.json").get("weight_map") or {}
        if shards:
            return sorted({folder / shard for name, shard in shards.items() if name.startswith(prefix)})
        if (folder / stem).is_file():
            return [folder / stem]
    raise ModelLoadError(f"{folder} contains no weights.")


def replace_synchronisations(model: nn.Module) -> None:
    """Replace functions of transformers that wait for the GPU by equivalent ones that do not, in the whole process.

    They copy a tensor of one number to the device, and the host waits for everything that was launched before.
    Arithmetic accepts such a tensor on the host.
    """
    # transformers would check on the device that images match their placeholders; the image formats have checked it.
    os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"
    masking_utils.or_masks = or_masks
    if getattr(model.config, "model_type", None) == "deberta-v2":
        modeling_deberta_v2.make_log_bucket_position = log_bucket_position
    code: Any = sys.modules[type(model).__module__]
    if hasattr(code, "create_recurrent_attention_mask"):
        code.create_recurrent_attention_mask = recurrent_mask


def or_masks(*mask_functions: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the union of mask functions, as transformers' function of this name; Gemma 3 passes a constant."""
    return lambda *indices: reduce(operator.or_, [function(*indices) for function in mask_functions])


def recurrent_mask(*, attention_mask: Tensor | None, **_: object) -> Tensor | None:
    """Return the mask of padding for LFM2's convolutions and alike; transformers' looks whether there is padding."""
    return attention_mask


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
