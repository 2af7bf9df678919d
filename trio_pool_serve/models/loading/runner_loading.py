"""Loading the runner of a model's folder."""

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.runner.allocator import keep_freed_memory
from trio_pool_serve.runner.computation import Place, choose_computation
from trio_pool_serve.runner.dtype import resolve_device, resolve_dtype
from trio_pool_serve.runner.loaded_model import LoadedModel, LoadingParams
from trio_pool_serve.runner.output_copy import CudaCopyBackend, OutputCopier
from trio_pool_serve.runner.transformer_runner import TransformerRunner
from trio_pool_serve.threads.offload import Offload

OUTPUT_BYTES = 2**30
"""Memory that the backbone's own output may take for one batch of the default size."""


def load_runner(folder: AnyModelFolder, config: ModelConfig, offload: Offload) -> TransformerRunner:
    """Load a model and compute one batch with it, so that the first request finds everything warm.

    Blocks for seconds. Raises ``ModelLoadError`` with a message for people.
    """
    device = resolve_device(config.device)
    if device.type == "cpu":
        keep_freed_memory()
    params = LoadingParams(
        device=device, dtype=resolve_dtype(config.dtype, device), trust_remote_code=config.trust_remote_code
    )
    loaded = folder.kind.loader()(folder, params)
    runner = TransformerRunner(
        loaded.backbone,
        loaded.heads,
        device,
        # Any id will do behind the mask; some configs have none, or −1.
        pad_token_id=max(0, folder.transformer_config.get("pad_token_id") or 0),
        default_batch_tokens=_default_batch_tokens(loaded, params),
        copier=OutputCopier(CudaCopyBackend(device), offload) if device.type == "cuda" else None,
    )
    try:
        runner.warm_up()
    except Exception as error:
        raise ModelLoadError(f"The model is loaded, but cannot compute its first batch: {error}") from error
    place = Place(device=device, dtype=params.dtype, pad_token_id=runner.pad_token_id, max_tokens=folder.max_model_len)
    computation = choose_computation(loaded, config, place)
    runner.compute, runner.pads = computation.compute, computation.pads
    dimensions = f", {runner.dimensions} dimensions" if runner.dimensions else ""
    runner.description = (
        f"{folder.model_type}, {loaded.backbone.parameters / 1e6:.1f} M parameters, "
        f"{str(params.dtype).removeprefix('torch.')} on {device}, "
        f"{loaded.about}{dimensions}, {folder.max_model_len} tokens"
        f"{''.join(f', {what}' for what in computation.about)}"
    )
    return runner


def _default_batch_tokens(loaded: LoadedModel, params: LoadingParams) -> int:
    """Enough to fill a GPU; on a processor, about what it computes while a short query may wait."""
    tokens = 2048 if params.device.type == "cpu" else 16384
    if loaded.output_width:
        tokens = min(tokens, max(256, OUTPUT_BYTES // (loaded.output_width * params.dtype.itemsize)))
    return tokens
