"""vLLM's ``--pooler-config``, translated to this server's settings."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, get_type_hints

import msgspec
from attrs import evolve

from trio_pool_serve.config.model_config import ModelConfig, Pooling
from trio_pool_serve.config.setting import choices_of, did_you_mean, flag_of
from trio_pool_serve.errors import require
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
        require(
            self.pooling_type is None or not (self.seq_pooling_type or self.tok_pooling_type),
            "Set either pooling_type, or seq_pooling_type and tok_pooling_type",
            ValueError,
        )
        require(
            None in (self.normalize, self.use_activation) or self.normalize == self.use_activation,
            "normalize and use_activation are one setting, but differ",
            ValueError,
        )

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
    text = loading.pooler_config or "{}"
    try:
        return msgspec.json.decode(text, type=PoolerConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"--pooler-config: {_reason(str(error))}") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"--pooler-config: `{text}` is not a JSON object.") from error


def _reason(message: str) -> str:
    """Return an error of msgspec in the words of this server's other messages."""
    hints = get_type_hints(PoolerConfig)
    if unknown := re.search("unknown field `(.*)`", message):
        accepted = ", ".join(hints)
        return f"Unknown field {unknown[1]}{did_you_mean(unknown[1], hints, f'; accepted: {accepted}.')}"
    if choice := re.search(r"Invalid enum value ('.*') - at `\$\.(\w+)`", message):
        return f"{choice[2]} is {choice[1]}; accepted: {', '.join(choices_of(hints[choice[2]]))}."
    return f"{message}."


def with_pooler_config(loading: ModelConfig) -> ModelConfig:
    """Return the settings, merged with the ones in ``pooler_config``.

    Raises ``ValueError`` if it is invalid or contradicts another flag.
    """
    meant = pooler_config_of(loading).settings()
    for name, value in meant.items():
        given = getattr(loading, name)
        require(
            given in (None, value),
            f"--pooler-config sets {name} to {value!r}, but {flag_of(name)} is {given!r}.",
            ValueError,
        )
    return evolve(loading, **meant)
