"""Page retrievers: late interaction of questions with images of pages."""

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
    model = load_checkpoint(folder, params, auto_class=spec.class_name, may_lack=())
    # The model's vectors have unit length already; after a cut to fewer dimensions they need it again.
    tokens = TokenEmbeddingHead(nn.Identity(), normalizes=True)
    return LoadedModel(
        backbone=PageRetriever(model, reads_types=spec.reads_types, fills_up=spec.class_name == "ColQwen2ForRetrieval"),
        heads={
            TokenEmbed: tokens,
            HoldQuery: HoldQueryHead(tokens),
            MaxSim: MaxSimHead(tokens, averages=spec.averages),
        },
        about="late interaction with pages",
    )
