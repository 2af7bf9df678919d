"""Classifiers of texts, of pairs and of tokens; cross-encoders among them."""

from typing import TYPE_CHECKING

from trio_pool_serve.models.classification.spec import Classifier, TokenClassifier, read_classifier
from trio_pool_serve.models.model_kind import ModelKind
from trio_pool_serve.rendering.chat.pair_templates import chat_pair

if TYPE_CHECKING:
    from trio_pool_serve.runner.openvino.exported_graph import BuiltHeads


def classifier_heads(spec: Classifier) -> "BuiltHeads":
    """Return the heads, with the activations of ``runner.heads.classification``. Raises ``UnusableGraphError``."""
    # Imported here: an optional dependency.
    from trio_pool_serve.runner.openvino.exported_graph import label_heads

    labels = len(spec.labels)
    probabilities = "Sigmoid" if spec.multi_label or labels == 1 else "Softmax"
    functions = {
        "probabilities": "Identity" if spec.problem_type == "regression" else probabilities,
        "score": spec.score_activation.rpartition(".")[2],
        "raw": "Identity",
    }
    return label_heads(labels, functions, of_tokens=isinstance(spec, TokenClassifier))


CLASSIFICATION = ModelKind(
    read=read_classifier,
    load="trio_pool_serve.models.classification.loading:load_classifier",
    exported_heads=classifier_heads,
    pair_format=lambda spec, tokenizer: chat_pair(spec.chat, tokenizer),
)
