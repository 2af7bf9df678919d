"""The classifiers of encoders, applied to a row's pooled state or to the state of each of its tokens."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor, nn

from trio_pool_serve.runner.forward_pass import ForwardPass
from trio_pool_serve.runner.heads.classification import first_state
from trio_pool_serve.runner.heads.pooling import POOLING_TYPES

RowLogits: TypeAlias = Callable[[ForwardPass], Tensor]
"""Maps a forward pass to [rows, labels]."""

TokenwiseLogits: TypeAlias = Callable[[Tensor], Tensor]
"""Maps states [tokens, hidden] to [tokens, labels]."""


def encoder_logits(model: Any) -> tuple[RowLogits, TokenwiseLogits]:
    """Return the logits of rows and of tokens of one of ``TOKENWISE_CLASSIFIERS``, computed in float32.

    Rows are as in transformers. Tokens are as in vLLM: they pass the classifier, but not the pooler that BERT and
    ModernBERT have for a row's state. BERT's pooler is removed from the model, which would compute it a second time.
    """
    classifier = model.classifier.float()
    if hasattr(classifier, "out_proj"):  # RoBERTa: all layers are the classifier's, which takes the first state itself
        of_states: TokenwiseLogits = lambda states: classifier(states.float()[:, None])  # noqa: E731
        return lambda forward: of_states(first_state(forward)), of_states
    if getattr(model.base_model, "pooler", None) is not None:
        pooler, model.base_model.pooler = model.base_model.pooler.float(), None
        of_row: RowLogits = lambda forward: classifier(pooler(first_state(forward).float()[:, None]))  # noqa: E731
    else:
        of_row = _modern_bert(model.head.float(), classifier, model.config.classifier_pooling)
    return of_row, lambda states: classifier(states.float())


def _modern_bert(head: nn.Module, classifier: nn.Module, pooling: str) -> RowLogits:
    def of_row(forward: ForwardPass) -> Tensor:
        states = forward.required_states
        pooled = (
            first_state(forward) if pooling == "cls" else POOLING_TYPES["mean"](states, np.zeros_like(states.lengths))
        )
        logits: Tensor = classifier(head(pooled.float()))
        return logits

    return of_row
