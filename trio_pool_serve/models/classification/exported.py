"""The heads of a classifier whose transformer is in an exported file, which gives its logits."""

from trio_pool_serve.models.classification.spec import Classifier, TokenClassifier
from trio_pool_serve.runner.openvino.built_heads import BuiltHeads, label_heads


def classifier_heads(spec: Classifier) -> BuiltHeads:
    """Return the heads, with the activations of ``runner.heads.classification``. Raises ``UnusableGraphError``."""
    labels = len(spec.labels)
    probabilities = "Sigmoid" if spec.multi_label or labels == 1 else "Softmax"
    functions = {
        "probabilities": "Identity" if spec.problem_type == "regression" else probabilities,
        "score": spec.score_activation.rpartition(".")[2],
        "raw": "Identity",
    }
    return label_heads(labels, functions, of_tokens=isinstance(spec, TokenClassifier))
