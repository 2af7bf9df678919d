"""Model types that cannot be served whatever else their folders have, by transformers, which is imported late."""

import importlib
from collections.abc import Mapping
from threading import Lock
from typing import Any

from trio_pool_serve.errors import ModelLoadError, require

ENCODER_CLASSES = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}
"""Classes by model type, for encoder–decoders whose encoder alone sentence-transformers uses."""

OF_CODE = "it is code of the model's repository (auto_map), which runs only with --trust-remote-code"

_importing = Lock()


def import_transformers() -> None:
    """Import transformers, before any of its names is imported. Blocks; the first time for seconds.

    During its import transformers replaces its own module. Another thread that waits for the import gets the first
    module, in which ``from transformers import AutoTokenizer`` fails. So every thread that loads models calls this
    first, and one thread alone imports.
    """
    with _importing:
        importlib.import_module("transformers")


def require_supported_type(place: str, config: Mapping[str, Any]) -> None:
    """Raise ``ModelLoadError`` for a config.json at ``place`` whose model type is unknown, or not supported.

    Its text is better than transformers', which would advise its newest code. Imports transformers.
    """
    import_transformers()
    from transformers import CONFIG_MAPPING

    model_type, code = config.get("model_type"), config.get("auto_map")
    if str(model_type) not in CONFIG_MAPPING:
        if model_type or code:
            wrong = (
                f"{model_type}, which transformers does not have" if model_type else f"missing, and auto_map is {code}"
            )
            raise ModelLoadError(f"{place}: model_type is {wrong}{f': {OF_CODE}' if code else ''}.")
        return
    names = [name for name in config.get("architectures") or () if name.endswith("ForSequenceClassification")]
    require(
        model_type not in ENCODER_CLASSES or not names,
        f"{place}: architectures is {names}, which computes with the decoder; accepted with model_type {model_type}: "
        f"{ENCODER_CLASSES.get(str(model_type))}, and classes that end in ForTokenClassification.",
    )
    try:
        default = CONFIG_MAPPING[str(model_type)]()
    except Exception:  # a few need arguments; loading the model reports the error
        return
    require(
        model_type in ENCODER_CLASSES or not config.get("is_encoder_decoder", default.is_encoder_decoder),
        f"{model_type} is an encoder–decoder, which is not supported.",
    )
    require(
        model_type != "reformer" or config.get("hash_seed") is not None,
        "reformer hashes tokens at random, so a text would get another vector each time.",
    )
    require(
        bool(default.sub_configs) or hasattr(default, "vocab_size") or hasattr(default, "max_position_embeddings"),
        f"{model_type} models read no text, and are not supported.",
    )
