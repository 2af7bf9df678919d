"""Kinds of model that a ``ScriptedRunner`` stands in for."""

import attrs

from trio_pool_serve.models.model_spec import ModelSpec, Similarity
from trio_pool_serve.service import Service


@attrs.frozen(kw_only=True)
class Everything(ModelSpec):
    """Can do whatever can be asked for; two labels with names."""

    tasks = frozenset({"embed", "token_embed", "sparse_embed", "classify", "token_classify", "score"})
    scoring = "vectors"
    labels: tuple[str, ...] = ("no", "yes")


@attrs.frozen(kw_only=True)
class Dots(Everything):
    """Compares vectors by their products, which are easily reckoned."""

    similarity: Similarity = "dot"


class Labeller(ModelSpec):
    """Sorts into classes without names."""

    tasks = frozenset({"classify"})


class Judge(ModelSpec):
    """Reads two texts together."""

    tasks = frozenset({"score"})
    scoring = "pairs"


class LateInteraction(ModelSpec):
    """Compares each token of one text with each of the other."""

    tasks = frozenset({"token_embed", "score"})
    scoring = "late_interaction"


class SparseOnly(ModelSpec):
    """Weights over the vocabulary."""

    tasks = frozenset({"sparse_embed", "score"})
    scoring = "vectors"


def serve_as(service: Service, spec: ModelSpec) -> None:
    """Have a running service take its model for one of another kind."""
    model = service.default.loaded
    folder = attrs.evolve(model.folder, spec=spec)
    service.default.loaded, service.default.folder = attrs.evolve(model, folder=folder), folder
