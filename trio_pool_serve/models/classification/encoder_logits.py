"""The classifiers of encoders, applied to a row's pooled state or to the state of each of its tokens."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from trio_pool_serve.runner.forward_pass import ForwardPass
from trio_pool_serve.runner.heads.classification import first_state
from trio_pool_serve.runner.heads.pooling import POOLING_TYPES

RowLogits: TypeAlias = Callable[[ForwardPass], Tensor]
"""Maps a forward pass to [rows, labels]."""

TokenwiseLogits: TypeAlias = Callable[[Tensor], Tensor]
"""Maps states [tokens, hidden] to [tokens, labels]."""


def encoder_logits(model: Any) -> tuple[RowLogits, TokenwiseLogits]:
    """Return the logits of rows and those of tokens, of one of ``TOKENWISE_CLASSIFIERS``.

    Rows are as in transformers. For tokens it is what vLLM computes: the classifier without the layers that only a
    row's pooled state passes, which are those of BERT's and ModernBERT's poolers.
    """
    classifier = model.classifier
    if hasattr(classifier, "out_proj"):  # RoBERTa: all layers are the classifier's, which takes the first state itself
        return lambda forward: classifier(first_state(forward)[:, None]), lambda states: classifier(states[:, None])
    pooler = getattr(model.base_model, "pooler", None)
    if pooler is not None:
        return lambda forward: classifier(pooler(first_state(forward)[:, None])), classifier
    return _modern_bert(model), classifier


def _modern_bert(model: Any) -> RowLogits:
    def of_row(forward: ForwardPass) -> Tensor:
        if model.config.classifier_pooling == "cls":
            pooled = first_state(forward)
        else:
            states = forward.required_states
            means = POOLING_TYPES["mean"](states, np.zeros_like(states.lengths))
            pooled = means.to(states.flat.dtype)
        logits: Tensor = model.classifier(model.head(pooled))
        return logits

    return of_row
