"""vLLM's ``--pooler-config``, in terms of this server's own settings."""

import json
from collections.abc import Mapping
from typing import Any

from attrs import evolve

from trio_pool_serve.config.model_config import ModelConfig

POOLING_TYPES: Mapping[str, str | None] = {"CLS": "cls", "MEAN": "mean", "LAST": "last", "ALL": None, "STEP": None}
"""This server's names of vLLM's pooling types; those for tokens select nothing: every token's vector is there."""

TYPE_FIELDS = ("pooling_type", "seq_pooling_type", "tok_pooling_type")

SETTINGS: Mapping[str, str] = {
    "task": "task",
    "use_activation": "normalize",
    "normalize": "normalize",
    "step_tag_id": "step_tag_id",
    "returned_token_ids": "returned_token_ids",
}
"""Fields that are settings of this server under another name, or the same."""

WITHOUT_EFFECT = frozenset({"enable_flash_late_interaction", "max_embed_len"})
"""The first chooses a GPU kernel; the second bounds texts that are embedded in windows, which are counted here."""

NOT_OFFERED: Mapping[str, str] = {
    "dimensions": "requests have a field dimensions",
    "logit_mean": "scores are not calibrated here",
    "logit_sigma": "scores are not calibrated here",
}


def with_pooler_config(loading: ModelConfig) -> ModelConfig:
    """Return settings in which those of ``pooler_config`` are among the others.

    Raises ``ValueError`` for what is not understood, not offered, or contradicts another flag.
    """
    if loading.pooler_config is None:
        return loading
    chosen: dict[str, Any] = {}
    for name, value in _parse(loading.pooler_config).items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name in NOT_OFFERED:
            raise ValueError(f"--pooler-config: {name} is not offered: {NOT_OFFERED[name]}.")
        if name in TYPE_FIELDS:
            if value not in POOLING_TYPES:
                raise ValueError(f"--pooler-config: {name} is {value!r}; known are {', '.join(POOLING_TYPES)}.")
            chosen |= {"pooling": POOLING_TYPES[value]} if POOLING_TYPES[value] else {}
        elif name == "enable_chunked_processing":
            chosen |= {"long_text": "chunk"} if value else {}
        elif name in SETTINGS:
            chosen[SETTINGS[name]] = tuple(value) if isinstance(value, list) else value
        else:
            raise ValueError(f"--pooler-config has a field {name!r}, which is not known.")
    unset = evolve(loading, pooler_config=None)
    for name, value in chosen.items():
        given = getattr(loading, name)
        if given not in (None, (), "refuse", value):
            raise ValueError(f"--pooler-config says {value!r} where --{name.replace('_', '-')} is {given!r}.")
    return evolve(unset, **chosen)


def _parse(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--pooler-config is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError("--pooler-config is not a JSON object.")  # noqa: TRY004  (of a setting)
    return document
