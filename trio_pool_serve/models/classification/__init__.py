"""Classifiers of texts, of pairs and of tokens; cross-encoders among them."""

from trio_pool_serve.models.classification.spec import read_classifier
from trio_pool_serve.models.model_kind import ModelKind
from trio_pool_serve.rendering.chat.pair_templates import chat_pair

CLASSIFICATION = ModelKind(
    read=read_classifier,
    load="trio_pool_serve.models.classification.loading:load_classifier",
    exported="trio_pool_serve.models.classification.exported:classifier_heads",
    pair_format=lambda spec, tokenizer: chat_pair(spec.chat, tokenizer),
)
