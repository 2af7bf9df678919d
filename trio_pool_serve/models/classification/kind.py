"""Classifiers of texts, of pairs and of tokens; cross-encoders among them."""

from trio_pool_serve.models.classification.pair_format import classifier_pair_format
from trio_pool_serve.models.classification.spec import read_classifier
from trio_pool_serve.models.model_kind import ModelKind

CLASSIFICATION = ModelKind(
    read=read_classifier,
    load="trio_pool_serve.models.classification.loading:load_classifier",
    pair_format=classifier_pair_format,
)
