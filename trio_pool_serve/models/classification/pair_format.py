"""Two texts as a classifier reads them."""

from trio_pool_serve.models.classification.spec import Classifier, SequenceClassifier
from trio_pool_serve.rendering.chat.pair_templates import chat_pair
from trio_pool_serve.rendering.text.pairs import PairFormat
from trio_pool_serve.rendering.text.tokenizer import Tokenizer


def classifier_pair_format(spec: Classifier, tokenizer: Tokenizer) -> PairFormat:
    """Return the pair format of a model. Raises ``ModelLoadError`` if its files require a template that is unusable."""
    return chat_pair(spec.chat if isinstance(spec, SequenceClassifier) else None, tokenizer)
