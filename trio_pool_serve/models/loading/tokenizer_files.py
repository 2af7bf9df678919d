"""Tokenizers as their files describe them, for installations without transformers.

Only of classes of transformers for which the files say all: others build more into a tokenizer than its file has.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.folder_files import read_json, read_text
from trio_pool_serve.models.loading.tokenizer_record import TokenizerRecord, chat_templates_of
from trio_pool_serve.models.model_kind import AnyModelFolder

FILE = "tokenizer.json"

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
BERT_NAMES = frozenset(NAMED[2:])
CLASSES: Mapping[str, frozenset[str]] = {
    "BertTokenizer": BERT_NAMES,
    "DistilBertTokenizer": BERT_NAMES,
    "MPNetTokenizer": frozenset(NAMED),
    "PreTrainedTokenizer": frozenset(),
    "Qwen2Tokenizer": frozenset({"eos_token", "unk_token", "pad_token"}),
    "RobertaTokenizer": frozenset(NAMED),
    "TokenizersBackend": frozenset(),
    "XLMRobertaTokenizer": frozenset(NAMED),
}
"""The special tokens that each class has in any case: the files have to say which."""

WITH_SEGMENTS = "BertTokenizer"
"""The class of ``CLASSES`` whose models have segments unless the files say otherwise."""

REPLACED: Mapping[str, str] = {
    "qwen2": "Qwen2Tokenizer",
    "qwen3_5": "Qwen3_5Tokenizer",
    "qwen3_5_moe": "Qwen3_5Tokenizer",
    "siglip2": "Siglip2Tokenizer",
}
"""The class that transformers takes for a type of model, whatever class its files name."""

TOKEN_FLAGS = ("content", "lstrip", "rstrip", "normalized", "single_word", "special")


def read_tokenizer(folder: AnyModelFolder, *, trust_remote_code: bool) -> tuple[tokenizers.Tokenizer, TokenizerRecord]:
    """Return the tokenizer of a folder's tokenizer.json, and its record.

    Raises ``ModelLoadError``, which says what transformers would be needed for.
    """
    own = folder.transformer_path
    try:
        config = {**read_json(own / "tokenizer_config.json")}
        if "added_tokens_decoder" not in config:
            config.update(read_json(own / "special_tokens_map.json"))
        document = json.loads(read_text(own / FILE))
        special_tokens = {name: _content(config[name]) for name in NAMED if config.get(name) is not None}
        fault = _fault(folder.model_type, config, document, special_tokens)
        if trust_remote_code and "auto_map" in config:
            fault = "it has code of its own"
        if not fault:
            return tokenizers.Tokenizer.from_file(str(own / FILE)), _record(folder, config, document, special_tokens)
    except Exception as error:  # the library raises nothing more precise
        fault = f"its files cannot be read: {error}"
    raise ModelLoadError(
        f"The tokenizer of {own} cannot be loaded without transformers: {fault}. Install it: pip install transformers"
    )


def _record(
    folder: AnyModelFolder, config: Mapping[str, Any], document: Mapping[str, Any], special_tokens: dict[str, str]
) -> TokenizerRecord:
    added = {token["content"]: token["id"] for token in document["added_tokens"]}
    named_ids = {name: added[token] for name, token in special_tokens.items()}
    inputs, direction = config.get("model_input_names"), (document.get("truncation") or {}).get("direction", "Right")
    templates = _chat_templates(folder.transformer_path) or config.get("chat_template")
    return TokenizerRecord(
        special_ids=sorted({*named_ids.values(), *(added[token] for token in _more_tokens(config))}),
        named_ids=named_ids,
        has_segments=_class_of(config) == WITH_SEGMENTS if inputs is None else "token_type_ids" in inputs,
        truncation_side=config.get("truncation_side") or direction.lower(),
        chat=chat_templates_of(folder, templates, special_tokens),
        splits_special_tokens=bool(config.get("split_special_tokens")),
    )


def _fault(
    model_type: str, config: Mapping[str, Any], document: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> str:
    """Return what transformers would make of the files that tokenizer.json alone does not tell; empty if nothing."""
    name = _class_of(config)
    if (replaced_by := REPLACED.get(model_type, name)) != name:
        return f"it is a {replaced_by}"
    if name not in CLASSES:
        return f"its tokenizer_class is {config.get('tokenizer_class')}"
    if missing := sorted(CLASSES[name] - config.keys()):
        return f"tokenizer_config.json and special_tokens_map.json name no {', '.join(missing)}"
    named = {key for key, value in config.items() if key.endswith("_token") and isinstance(value, str | dict)}
    if others := sorted(named - {*NAMED}):
        return f"tokenizer_config.json names other tokens: {', '.join(others)}"
    if isinstance(config.get("extra_special_tokens"), dict):
        return "tokenizer_config.json gives names to extra_special_tokens"
    added = {token["id"]: _flags(token) for token in document["added_tokens"]}
    tokens = {*special_tokens.values(), *_more_tokens(config)}
    if lacking := sorted(tokens - {token["content"] for token in document["added_tokens"]}):
        return f"{FILE} does not add {', '.join(lacking)}"
    said = {int(index): _flags(token) for index, token in (config.get("added_tokens_decoder") or {}).items()}
    if said not in ({}, added):
        return f"tokenizer_config.json and {FILE} add different tokens"
    normalizer, pre_tokenizer = document.get("normalizer") or {}, document.get("pre_tokenizer") or {}
    in_file = {
        "do_lower_case": normalizer.get("lowercase"),
        "strip_accents": normalizer.get("strip_accents"),
        "tokenize_chinese_chars": normalizer.get("handle_chinese_chars"),
        "add_prefix_space": pre_tokenizer.get("add_prefix_space"),
    }
    differ = [key for key, value in in_file.items() if value is not None and config.get(key, value) != value]
    return f"tokenizer_config.json and {FILE} differ in {', '.join(differ)}" if differ else ""


def _class_of(config: Mapping[str, Any]) -> str:
    return str(config.get("tokenizer_class")).removesuffix("Fast")


def _more_tokens(config: Mapping[str, Any]) -> list[str]:
    """Return the special tokens without names."""
    return [*map(_content, config.get("extra_special_tokens") or config.get("additional_special_tokens") or ())]


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _flags(token: Mapping[str, Any]) -> list[Any]:
    return [token.get(flag, False) for flag in TOKEN_FLAGS]


def _chat_templates(path: Path) -> dict[str, str]:
    """Return the tokenizer's chat templates that have files of their own."""
    files = {file.stem: file for file in sorted(path.glob("additional_chat_templates/*.jinja"))}
    if (path / "chat_template.jinja").exists():
        files["default"] = path / "chat_template.jinja"
    return {name: read_text(file) for name, file in files.items()}
