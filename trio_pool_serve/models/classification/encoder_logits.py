"""The classifiers of encoders, applied to a row's pooled state or to the state of each of its tokens."""

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

from trio_pool_serve.runner.forward_pass import ForwardPass

Logits: TypeAlias = Callable[[ForwardPass], Tensor]
"""Maps a forward pass to [rows, labels], or [rows, tokens, labels]."""


def encoder_logits(model: Any) -> tuple[Logits, Logits]:
    """Return the logits of rows and those of tokens, of one of ``TOKENWISE_CLASSIFIERS``.

    Rows are as in transformers. For tokens it is what vLLM computes: the classifier without the layers that only a
    row's pooled state passes, which are those of BERT's and ModernBERT's poolers.
    """
    classifier = model.classifier
    if hasattr(classifier, "out_proj"):  # RoBERTa: all layers are the classifier's, which takes the first state itself
        return lambda forward: classifier(forward.required_states), lambda forward: _each_token(classifier, forward)
    pooler = getattr(model.base_model, "pooler", None)
    of_row = _bert(pooler, classifier) if pooler is not None else _modern_bert(model)

    def of_tokens(forward: ForwardPass) -> Tensor:
        logits: Tensor = classifier(forward.required_states)
        return logits

    return of_row, of_tokens


def _each_token(classifier: Callable[[Tensor], Tensor], forward: ForwardPass) -> Tensor:
    states = forward.required_states
    rows, tokens, hidden = states.shape
    return classifier(states.reshape(rows * tokens, 1, hidden)).reshape(rows, tokens, -1)


def _bert(pooler: Callable[[Tensor], Tensor], classifier: Callable[[Tensor], Tensor]) -> Logits:
    return lambda forward: classifier(pooler(forward.required_states))


def _modern_bert(model: Any) -> Logits:
    def of_row(forward: ForwardPass) -> Tensor:
        states, mask = forward.required_states, forward.attention_mask
        if model.config.classifier_pooling == "cls":
            pooled = states[:, 0]
        else:
            pooled = (states * mask.unsqueeze(-1)).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        logits: Tensor = model.classifier(model.head(pooled))
        return logits

    return of_row
