"""From a model's folder to a runner."""

from collections.abc import Mapping

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.bge_m3.loading import load_bge_m3
from trio_pool_serve.models.bge_m3.spec import BgeM3
from trio_pool_serve.models.classification.loading import load_sequence_classifier, load_token_classifier
from trio_pool_serve.models.classification.spec import CrossEncoder, SequenceClassifier, TokenClassifier
from trio_pool_serve.models.dual_encoder.loading import load_dual_encoder
from trio_pool_serve.models.dual_encoder.spec import DualEncoder
from trio_pool_serve.models.embedding.loading import load_embedding
from trio_pool_serve.models.embedding.spec import Embedding
from trio_pool_serve.models.folder import ModelFolder
from trio_pool_serve.models.generative_reranker.loading import load_generative_reranker
from trio_pool_serve.models.generative_reranker.spec import GenerativeReranker
from trio_pool_serve.models.kind import Architecture
from trio_pool_serve.models.late_interaction.loading import load_late_interaction
from trio_pool_serve.models.late_interaction.spec import LateInteraction
from trio_pool_serve.models.page_retrieval.loading import load_page_retrieval
from trio_pool_serve.models.page_retrieval.spec import PageRetrieval
from trio_pool_serve.models.process_reward.loading import load_process_reward
from trio_pool_serve.models.process_reward.spec import ProcessReward
from trio_pool_serve.models.sparse.loading import load_sparse
from trio_pool_serve.models.sparse.spec import Sparse
from trio_pool_serve.models.vision_language.loading import load_vision_language
from trio_pool_serve.models.vision_language.spec import VisionLanguage
from trio_pool_serve.runner.allocator import keep_freed_memory
from trio_pool_serve.runner.computation import Place, choose_computation
from trio_pool_serve.runner.dtype import resolve_device, resolve_dtype
from trio_pool_serve.runner.loaded_model import LoadedModel, Loader, LoadingParams
from trio_pool_serve.runner.output_copy import CudaCopyBackend, OutputCopier
from trio_pool_serve.runner.transformer_runner import TransformerRunner
from trio_pool_serve.threads.offload import Offload

LOADERS: Mapping[type[Architecture], Loader] = {
    Embedding: load_embedding,
    SequenceClassifier: load_sequence_classifier,
    CrossEncoder: load_sequence_classifier,
    TokenClassifier: load_token_classifier,
    GenerativeReranker: load_generative_reranker,
    ProcessReward: load_process_reward,
    BgeM3: load_bge_m3,
    LateInteraction: load_late_interaction,
    Sparse: load_sparse,
    DualEncoder: load_dual_encoder,
    VisionLanguage: load_vision_language,
    PageRetrieval: load_page_retrieval,
}
"""How each kind of model is loaded."""

OUTPUT_BYTES = 2**30
"""Memory that the backbone's own output may take for one batch of the default size."""


def load_runner(folder: ModelFolder, config: ModelConfig, offload: Offload) -> TransformerRunner:
    """Load a model and compute one batch with it, so that the first request finds everything warm.

    Blocks for seconds. Raises ``ModelLoadError`` with a message for people.
    """
    device = resolve_device(config.device)
    if device.type == "cpu":
        keep_freed_memory()
    params = LoadingParams(
        device=device, dtype=resolve_dtype(config.dtype, device), trust_remote_code=config.trust_remote_code
    )
    loaded = LOADERS[type(folder.architecture)](folder, params)
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
