"""Classifiers of texts, of pairs and of tokens; cross-encoders among them."""

from trio_pool_serve.models.classification.spec import Classifier, SequenceClassifier, read_classifier
from trio_pool_serve.models.model_kind import ModelKind
from trio_pool_serve.rendering.chat.pair_templates import chat_pair
from trio_pool_serve.rendering.text.pairs import PairFormat
from trio_pool_serve.rendering.text.tokenizer import Tokenizer


def classifier_pair_format(spec: Classifier, tokenizer: Tokenizer) -> PairFormat:
    """Return the pair format. Raises ``ModelLoadError`` if the files require a chat template that is unusable."""
    return chat_pair(spec.chat if isinstance(spec, SequenceClassifier) else None, tokenizer)


CLASSIFICATION = ModelKind(
    read=read_classifier,
    load="trio_pool_serve.models.classification.loading:load_classifier",
    exported="trio_pool_serve.models.classification.exported:classifier_heads",
    pair_format=classifier_pair_format,
)
