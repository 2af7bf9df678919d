"""vLLM's ``--pooler-config``, translated to this server's settings."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from attrs import evolve

from trio_pool_serve.config.model_config import ModelConfig, Pooling
from trio_pool_serve.types import PoolingTask

RowPooling: TypeAlias = Literal["CLS", "LAST", "MEAN"]
TokenPooling: TypeAlias = Literal["ALL", "STEP"]
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]

POOLING: Mapping[str, Pooling] = {"CLS": "cls", "LAST": "last", "MEAN": "mean"}
"""Pooling types of rows. Pooling types of tokens select nothing: responses contain every token's vector."""


class PoolerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The accepted fields. ``max_embed_len`` and ``enable_flash_late_interaction`` have no effect here.

    The former bounds texts that are embedded in windows, but this server bounds the number of windows; the latter
    selects a GPU kernel.
    """

    task: PoolingTask | None = None
    pooling_type: RowPooling | TokenPooling | None = None
    seq_pooling_type: RowPooling | None = None
    tok_pooling_type: TokenPooling | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    enable_chunked_processing: bool = False
    max_embed_len: int | None = None
    enable_flash_late_interaction: bool = True
    step_tag_id: TokenId | None = None
    """The token that ends a step, for process reward models."""
    returned_token_ids: tuple[TokenId, ...] = ()
    """Tokens whose probabilities are the scores of a step, for causal language models that judge steps."""

    def __post_init__(self) -> None:
        if self.pooling_type is not None and (self.seq_pooling_type or self.tok_pooling_type):
            raise ValueError("pooling_type excludes seq_pooling_type and tok_pooling_type")
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise ValueError("normalize and use_activation mean the same, but differ")

    def settings(self) -> dict[str, Any]:
        """Return the equivalent settings of this server, by name."""
        meant = {
            "task": self.task,
            "pooling": POOLING.get(self.pooling_type or self.seq_pooling_type or ""),
            "normalize": self.use_activation if self.normalize is None else self.normalize,
            "long_text": "chunk" if self.enable_chunked_processing else None,
        }
        return {name: value for name, value in meant.items() if value is not None}


def pooler_config_of(loading: ModelConfig) -> PoolerConfig:
    """Return the ``pooler_config`` of a model's settings. Raises ``ValueError`` if it is invalid."""
    try:
        return msgspec.json.decode(loading.pooler_config or "{}", type=PoolerConfig, strict=False)
    except msgspec.DecodeError as error:
        raise ValueError(f"--pooler-config is not understood: {error}.") from error


def with_pooler_config(loading: ModelConfig) -> ModelConfig:
    """Return the settings, merged with the ones in ``pooler_config``.

    Raises ``ValueError`` if it is invalid or contradicts another flag.
    """
    meant = pooler_config_of(loading).settings()
    for name, value in meant.items():
        given = getattr(loading, name)
        if given not in (None, value):
            raise ValueError(f"--pooler-config says {value!r} where --{name.replace('_', '-')} is {given!r}.")
    return evolve(loading, **meant)
