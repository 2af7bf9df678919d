"""Generative rerankers: a language model, and the few words it judges by."""

from trio_pool_serve.models.generative_reranker.spec import GenerativeReranker
from trio_pool_serve.models.loading.language_model import load_word_scores
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.runner.heads.classification import ClassificationHead, YesNoLogits, activation_functions
from trio_pool_serve.runner.loaded_model import LoadedModel, LoadingParams
from trio_pool_serve.types import Classify


def load_generative_reranker(folder: ModelFolder[GenerativeReranker], params: LoadingParams) -> LoadedModel:
    """Load a ``GenerativeReranker``."""
    spec = folder.spec
    functions = activation_functions(labels=1, problem_type=None, score_activation=spec.score_activation)
    words = [spec.yes] if spec.no is None else [spec.yes, spec.no]
    backbone, scores = load_word_scores(folder, params, words)
    return LoadedModel(
        backbone=backbone,
        heads={Classify: ClassificationHead(YesNoLogits(scores), functions)},
        about=f"judging by {len(words)} word{'s' if len(words) > 1 else ''}",
    )
