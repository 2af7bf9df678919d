"""What the files of a model's folder declare, whatever its kind."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

from attrs import frozen

from trio_pool_serve.prompts import InputType
from trio_pool_serve.types import PoolingParams, PoolingTask, SparseEmbed

Scoring: TypeAlias = Literal["pairs", "vectors", "late_interaction"]
"""How two texts are compared. pairs: the model reads both together. vectors: each has a vector.
late_interaction: each token has one."""

Similarity: TypeAlias = Literal["cosine", "dot", "euclidean", "manhattan"]
"""Of two vectors; the distances are negated, so that greater is more alike."""


@frozen(kw_only=True)
class ModelSpec:
    """What a model can do and how its inputs are prepared; each kind overrides what differs from these defaults."""

    tasks: ClassVar[frozenset[PoolingTask]] = frozenset()
    scoring: ClassVar[Scoring | None] = None
    supports_prompt_embeds: ClassVar[bool] = False
    """Whether ``prompt_embeds`` can replace token ids: the heads read hidden states only, never token ids."""
    supports_messages: ClassVar[bool] = True
    """Whether its chat template is for inference, so that ``messages`` are accepted."""
    keeps_input_type_prompt: ClassVar[bool] = False
    """Whether a client's own instruction follows the prompt of its input type instead of replacing it."""

    @property
    def similarity(self) -> Similarity:
        """How ``scoring == "vectors"`` compares them."""
        return "cosine"

    @property
    def pooling(self) -> str:
        """How token vectors become the text's, as ``GET /info`` names it; ``none`` if each token keeps its own."""
        return "none"

    @property
    def pools_instruction(self) -> bool:
        """Whether the pooler includes the instruction's tokens."""
        return True

    @property
    def marker_tokens(self) -> tuple[str, ...]:
        """Texts that the tokenizer must keep as one token each, if they are in its vocabulary."""
        return ()

    @property
    def multi_label(self) -> bool:
        """Whether several labels can apply to one input at once."""
        return False

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the numbers that ``Classify`` and ``TokenClassify`` give, in order."""
        return ()

    @property
    def extra_prompts(self) -> Mapping[str, str]:
        """Instructions, by name, that its files hold elsewhere than other models' do."""
        return {}

    @property
    def uses_chat_template(self) -> bool:
        """Whether texts and images are read as a conversation of one user message.

        The instruction is then a system message before it.
        """
        return False

    @property
    def max_input_tokens(self) -> int:
        """Tokens that it takes for some input type, though its tokenizer's limit may be less."""
        return 0

    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]:
        """What its files have the chat template rendered with."""
        return {}

    def sparse_params(self, input_type: InputType | None) -> PoolingParams:
        """Return what to ask for the sparse vector of a text of this input type."""
        del input_type  # only some models tell them apart
        return SparseEmbed()
