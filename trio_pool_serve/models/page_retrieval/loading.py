"""Loading page retrievers: late interaction between a query and images of pages."""

from torch import nn

from trio_pool_serve.models.loading.checkpoint import load_checkpoint
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.models.page_retrieval.spec import PageRetrieval
from trio_pool_serve.models.page_retrieval.vision_backbone import PageRetriever
from trio_pool_serve.runner.heads.embedding import TokenEmbeddingHead
from trio_pool_serve.runner.heads.maxsim import HoldQueryHead, MaxSimHead
from trio_pool_serve.runner.loaded_model import LoadedModel, LoadingParams
from trio_pool_serve.types import HoldQuery, MaxSim, TokenEmbed


def load_page_retrieval(folder: ModelFolder[PageRetrieval], params: LoadingParams) -> LoadedModel:
    """Load a ``PageRetrieval`` model."""
    spec = folder.spec
    model = load_checkpoint(folder, params, auto_class=spec.class_name, optional_weights=())
    # The model's vectors have unit length; after truncation to fewer dimensions they are normalised again.
    tokens = TokenEmbeddingHead(nn.Identity(), normalizes=True)
    return LoadedModel(
        backbone=PageRetriever(
            model, needs_token_type_ids=spec.needs_token_type_ids, pads_images=spec.class_name == "ColQwen2ForRetrieval"
        ),
        heads={
            TokenEmbed: tokens,
            HoldQuery: HoldQueryHead(tokens),
            MaxSim: MaxSimHead(tokens, mean_scores=spec.mean_scores),
        },
        description="late interaction with pages",
    )
