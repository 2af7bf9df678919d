"""What kinds of pooling model there are.

Each record holds what its kind's files say, and tells what such a model can be asked for. Rendering and
loading take from it what they need; tasks read ``tasks``, ``scoring``, ``labels`` and the like.
"""

from typing import ClassVar, Literal, TypeAlias

from attrs import frozen

from trio_pool_serve.model_folder.files import ModuleFiles
from trio_pool_serve.types import PoolingParams, PoolingTask, Role, SparseEmbed

Scoring: TypeAlias = Literal["pairs", "vectors", "late_interaction"]
"""How two texts are compared. pairs: the model reads both together. vectors: each has a vector.
late_interaction: each token has one."""

Similarity: TypeAlias = Literal["cosine", "dot", "euclidean", "manhattan"]
"""Of two vectors; the distances are negated, so that greater is more alike."""


@frozen(kw_only=True)
class Architecture:
    """What every kind has; the answers of a kind that has no such thing."""

    tasks: ClassVar[frozenset[PoolingTask]] = frozenset()
    scoring: ClassVar[Scoring | None] = None

    @property
    def similarity(self) -> Similarity:
        """How ``scoring == "vectors"`` compares them."""
        return "cosine"

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the numbers that ``Classify`` and ``TokenClassify`` give, in order."""
        return ()

    def sparse_params(self, role: Role | None) -> PoolingParams:
        """Return what to ask for the sparse vector of a text in this role."""
        del role  # only some models tell them apart
        return SparseEmbed()


@frozen(kw_only=True)
class Embedding(Architecture):
    """A transformer, a Pooling module, and the modules behind it."""

    modules: tuple[ModuleFiles, ...]
    """Those after the transformer, in order."""
    vector_similarity: Similarity = "cosine"

    tasks = frozenset({"embed", "token_embed", "score"})
    scoring = "vectors"

    @property
    def similarity(self) -> Similarity:
        """``similarity_fn_name`` of config_sentence_transformers.json."""
        return self.vector_similarity

    @property
    def pools_instruction(self) -> bool:
        """Whether the pooler looks at the instruction's tokens too, as nearly every model's does."""
        return all(module.config.get("include_prompt", True) for module in self.modules if module.name == "Pooling")
