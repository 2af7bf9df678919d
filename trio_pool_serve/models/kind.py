"""What kinds of pooling model there are.

Each record holds what its kind's files say, and tells what such a model can be asked for. Rendering and
loading take from it what they need; tasks read ``tasks``, ``scoring``, ``labels`` and the like.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeAlias

from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.models.files.folder_files import FolderFiles
from trio_pool_serve.prompts import Role
from trio_pool_serve.types import PoolingParams, PoolingTask, SparseEmbed

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
    takes_embeds: ClassVar[bool] = False
    """Whether its heads look at states alone, and never at which tokens they are of."""

    @property
    def similarity(self) -> Similarity:
        """How ``scoring == "vectors"`` compares them."""
        return "cosine"

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the numbers that ``Classify`` and ``TokenClassify`` give, in order."""
        return ()

    @property
    def own_prompts(self) -> Mapping[str, str]:
        """Instructions, by name, that its files hold elsewhere than other models' do."""
        return {}

    @property
    def in_conversation(self) -> bool:
        """Whether texts and images are read as a conversation of one user message.

        The instruction is then a system message before it.
        """
        return False

    @property
    def longest_input(self) -> int:
        """Tokens that it takes in some role, though its tokenizer's limit may be less."""
        return 0

    @property
    def template_options(self) -> Mapping[str, Any]:
        """What its files have the chat template rendered with."""
        return {}

    def sparse_params(self, role: Role | None) -> PoolingParams:
        """Return what to ask for the sparse vector of a text in this role."""
        del role  # only some models tell them apart
        return SparseEmbed()


ReadArchitecture: TypeAlias = Callable[[FolderFiles, ModelConfig], Architecture | None]
"""Returns what a folder's files describe if it is of the reader's kind, else ``None``.

Raises ``ModelLoadError`` for a folder of its kind that asks for something that is not supported.
"""
