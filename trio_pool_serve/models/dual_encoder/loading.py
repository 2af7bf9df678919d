"""Loading dual encoders: a text tower and an image tower with one vector space."""

from trio_pool_serve.models.dual_encoder.spec import DualEncoder
from trio_pool_serve.models.dual_encoder.vision_backbone import TwoTowers
from trio_pool_serve.models.loading.checkpoint import load_checkpoint
from trio_pool_serve.models.loading.sentence_modules import load_output_modules
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.runner.heads.embedding import EmbeddingHead
from trio_pool_serve.runner.loaded_model import LoadedModel, LoadingParams
from trio_pool_serve.types import Embed


def load_dual_encoder(folder: ModelFolder[DualEncoder], params: LoadingParams) -> LoadedModel:
    """Load a ``DualEncoder`` model."""
    heads = load_output_modules(folder.spec.modules, params.device)
    return LoadedModel(
        backbone=TwoTowers(load_checkpoint(folder, params, optional_weights=())),
        heads={Embed: EmbeddingHead(heads)},
        description="texts and images",
    )
