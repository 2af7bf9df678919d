"""Loading generative rerankers: a causal language model and the logits of its yes and no tokens."""

from torch import Tensor

from trio_pool_serve.models.generative_reranker import GenerativeReranker
from trio_pool_serve.models.loading.checkpoint import load_selected_logits
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.runner.heads.classification import ClassificationHead, activation_functions
from trio_pool_serve.runner.loaded_model import LoadedModel, LoadingParams
from trio_pool_serve.types import Classify


def load_generative_reranker(folder: ModelFolder[GenerativeReranker], params: LoadingParams) -> LoadedModel:
    """Load a ``GenerativeReranker``."""
    spec = folder.spec
    functions = activation_functions(
        {"probabilities": "torch.nn.Sigmoid", "score": spec.score_activation, "raw": "torch.nn.Identity"}
    )
    token_ids = [spec.true_token_id] if spec.false_token_id is None else [spec.true_token_id, spec.false_token_id]
    backbone, logits = load_selected_logits(folder, params, token_ids)
    return LoadedModel(
        backbone=backbone,
        heads={Classify: ClassificationHead("last_attended", lambda states: score_of(logits(states)), functions)},
        description=f"scores from the logits of {len(token_ids)} token{'s' if len(token_ids) > 1 else ''}",
    )


def score_of(words: Tensor) -> Tensor:
    """Return ``logit(yes) − logit(no)``, [rows, 1]: the log-odds of yes among these two words.

    ``words`` has both logits in this order, or the logit of yes alone, which then is the score.
    """
    return words[:, :1] - words[:, 1:] if words.shape[1] == 2 else words
