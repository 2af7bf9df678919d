"""A scripted service whose model can do everything that dialects ask for."""

import attrs

from trio_pool_serve.models.model_spec import ModelSpec
from trio_pool_serve.service import Service

PROMPTS = {"query": "query : ", "document": "passage : ", "classification": "hello ", "code.query": "world "}


@attrs.frozen(kw_only=True)
class Everything(ModelSpec):
    """Scores by late interaction: scripted, a score is how many of the query's tokens a document has."""

    tasks = frozenset({"embed", "score", "classify"})
    scoring = "late_interaction"
    labels: tuple[str, ...] = ("short", "long")


@attrs.frozen(kw_only=True)
class Nothing(ModelSpec):
    """Can do nothing that these dialects ask for."""

    tasks = frozenset({"token_embed"})


def become(service: Service, spec: ModelSpec) -> None:
    """Have the service's model be of another spec, with prompts for every purpose."""
    model = service.default.loaded
    folder = attrs.evolve(model.folder, spec=spec, prompts=PROMPTS)
    service.default.loaded, service.default.folder = attrs.evolve(model, folder=folder), folder
