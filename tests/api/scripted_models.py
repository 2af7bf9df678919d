"""Kinds of model that a ``ScriptedRunner`` stands in for, and the vectors that it makes."""

from typing import Any

import attrs
import numpy as np
import pytest

from tests.model_folders import VOCABULARY
from tests.scripted_runner import scripted_vector
from trio_pool_serve.models.model_kind import ModelSpec, Similarity
from trio_pool_serve.service import Service

LONG = " ".join(f"w{n}" for n in range(100))
"""More than the 64 tokens that the scripted model reads."""

PROMPTS = {"query": "query : ", "document": "passage : ", "classification": "hello ", "code.query": "world "}


def ids_of(text: str) -> list[int]:
    return [VOCABULARY["[CLS]"], *(VOCABULARY[word] for word in text.split()), VOCABULARY["[SEP]"]]


def array_of(given: str | list[int], dimensions: int = 8) -> np.ndarray:
    """Return the vector of a text or of its token ids."""
    ids = ids_of(given) if isinstance(given, str) else given
    return scripted_vector(np.array(ids, dtype=np.int32), dimensions)


def vector_of(given: str | list[int], dimensions: int = 8) -> list[float]:
    return array_of(given, dimensions).tolist()


@attrs.frozen(kw_only=True)
class Everything(ModelSpec):
    """Can do whatever can be asked for; two labels with names."""

    tasks = frozenset({"embed", "token_embed", "sparse_embed", "classify", "token_classify", "score"})
    scoring = "vectors"
    labels: tuple[str, ...] = ("no", "yes")


@attrs.frozen(kw_only=True)
class Able(ModelSpec):
    """Scores by late interaction: scripted, a score is how many of the query's tokens a document has."""

    tasks = frozenset({"embed", "score", "classify"})
    scoring = "late_interaction"
    labels: tuple[str, ...] = ("short", "long")


@attrs.frozen(kw_only=True)
class Chunkable(Able):
    """Pools by the mean, so it gives the vectors of chunks."""

    pools_chunks = True


class Unable(ModelSpec):
    """Can do none of the tasks that dialects ask for."""

    tasks = frozenset({"token_classify"})


@attrs.frozen(kw_only=True)
class Dots(Everything):
    """Compares vectors by their products, which are easily reckoned."""

    similarity: Similarity = "dot"


class Undeclared(ModelSpec):
    """A language model that may be a reranker, so its vectors are not compared."""

    tasks = frozenset({"embed", "token_embed"})
    scoring = "vectors"


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


def serve_as(service: Service, spec: ModelSpec, **changes: Any) -> None:
    """Have a running service take its model for one of another kind, with other ``changes`` of its folder."""
    served = service.models.find()
    model = served.loaded
    assert model is not None
    folder = attrs.evolve(model.folder, spec=spec, **changes)
    served.loaded, served.folder = attrs.evolve(model, folder=folder), folder


def become(service: Service, spec: ModelSpec) -> None:
    """Have a running service take its model for one of another kind, with prompts for every input type."""
    serve_as(service, spec, prompts=PROMPTS)


def served_as(spec: ModelSpec, **changes: Any) -> Any:
    """Return a fixture ``service``: a ready service whose model is of another kind."""

    @pytest.fixture
    async def service(service: Service) -> Service:
        serve_as(service, spec, **changes)
        return service

    return service
