"""Loading transformers' classifiers, for whole inputs and for tokens."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from trio_pool_serve.errors import require
from trio_pool_serve.models.classification import Classifier, TokenClassifier
from trio_pool_serve.models.loading.checkpoint import load_checkpoint
from trio_pool_serve.models.loading.sentence_modules import load_pooled
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.runner.batch_rows import RowState
from trio_pool_serve.runner.forward_pass import Head
from trio_pool_serve.runner.heads.classification import (
    ActivationFunctions,
    ClassificationHead,
    Logits,
    PooledClassificationHead,
    TokenClassificationHead,
    activation_functions,
    identity,
)
from trio_pool_serve.runner.loaded_model import Backbone, LoadedModel, LoadingParams
from trio_pool_serve.types import Classify, PoolingParams, TokenClassify


def encoder_logits(model: Any) -> tuple[RowState, Logits, Logits]:
    """Return the state that one of ``TOKENWISE_CLASSIFIERS`` reads of a row, and the logits of rows and of tokens.

    Rows are as in transformers. Tokens are as in vLLM: they pass the classifier, but not the pooler that BERT and
    ModernBERT have for a row's state. BERT's pooler is removed from the model, which would compute it a second time.
    """
    classifier = model.classifier.float()
    if hasattr(classifier, "out_proj"):  # RoBERTa: all layers are the classifier's, which takes the first state itself
        of_states: Logits = lambda states: classifier(states[:, None])  # noqa: E731
        return "first", of_states, of_states
    if getattr(model.base_model, "pooler", None) is not None:
        pooler, model.base_model.pooler = model.base_model.pooler.float(), None
        return "first", lambda states: classifier(pooler(states[:, None])), classifier
    state: RowState = "first" if model.config.classifier_pooling == "cls" else "whole_mean"
    return state, nn.Sequential(model.head.float(), classifier), classifier


DECODER_STATES: Mapping[str, RowState] = {"lasttoken": "last_attended", "mean": "whole_mean", "cls": "first"}
"""The state of a row that a decoder's linear layer reads, by pooling type."""

NEEDS_LEFT_PADDING = frozenset({"xlnet", "ctrl"})
"""Model types whose classifiers use the last position of a row, even if it is padding."""


def load_classifier(folder: ModelFolder[Classifier], params: LoadingParams) -> LoadedModel:
    """Load a classifier of whole inputs or of tokens.

    A decoder's head uses the last token, unless its files declare another pooling. transformers finds it by the
    padding token's id, which an input may contain too; here it is the last token that is attended to.
    """
    if folder.spec.modules:
        backbone, pooler, output_width = load_pooled(folder, params)
        return LoadedModel(
            backbone=backbone,
            heads={Classify: PooledClassificationHead(pooler, activation_functions(folder.spec.activations))},
            description=_description(folder, f"by {'+'.join(pooler.pooling)} pooling"),
            output_width=output_width,
        )
    if isinstance(folder.spec, TokenClassifier):
        model, functions = _load(folder, params, "AutoModelForTokenClassification")
        return LoadedModel(
            backbone=Backbone(model, "logits"),
            heads={TokenClassify: TokenClassificationHead(identity, functions)},
            description=_description(folder, "for each token"),
        )
    require(
        folder.model_type not in NEEDS_LEFT_PADDING,
        f"{folder.model_type}'s classifier needs padding on the left, which is not supported.",
    )
    model, functions = _load(folder, params, "AutoModelForSequenceClassification")
    state = DECODER_STATES[folder.spec.pooled]
    modules = dict(model.named_modules())
    if isinstance(getattr(model, "score", None), nn.Linear):
        of_row, where = model.score.float(), "by the last token" if state == "last_attended" else f"by {state}"
        of_tokens = of_row
    elif folder.spec.of_tokens:
        (state, of_row, of_tokens), where = encoder_logits(model), "for each input or token"
    else:
        return LoadedModel(
            backbone=Backbone(model, "logits"),
            heads={Classify: ClassificationHead("first", identity, functions)},
            description=_description(folder, "for each input"),
        )
    heads: dict[type[PoolingParams], Head] = {Classify: ClassificationHead(state, of_row, functions)}
    if folder.spec.of_tokens:
        heads[TokenClassify] = TokenClassificationHead(of_tokens, functions)
    return LoadedModel(
        backbone=Backbone(model.base_model), heads=heads, description=_description(folder, where), modules=modules
    )


def _load(folder: ModelFolder[Classifier], params: LoadingParams, auto_class: str) -> tuple[Any, ActivationFunctions]:
    spec = folder.spec
    functions = activation_functions(spec.activations)
    model: Any = load_checkpoint(folder, params, auto_class=auto_class, optional_weights=())
    require(
        model.config.num_labels == len(spec.labels),
        f"config.json lists {len(spec.labels)} labels, but the model has {model.config.num_labels}.",
    )
    return model, functions


def _description(folder: ModelFolder[Classifier], where: str) -> str:
    labels = len(folder.spec.labels)
    return f"{labels} label{'s' if labels > 1 else ''} {where}"
