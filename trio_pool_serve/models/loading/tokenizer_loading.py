"""Loading the tokenizer of a model's folder: from the cache, with transformers, or from its files alone.

transformers is imported only when it is needed.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from attrs import frozen
from tokenizers import normalizers

from trio_pool_serve.errors import ModelLoadError, StorageError, install_extra
from trio_pool_serve.models.files.chat_settings import processor_template
from trio_pool_serve.models.files.folder_files import read_json, read_text
from trio_pool_serve.models.files.model_digest import SMALL_FILES, model_entry
from trio_pool_serve.models.loading.architectures import import_transformers, require_supported_type
from trio_pool_serve.models.loading.vocabulary import fit_vocabulary, require_rows, require_tokenizer_files
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.prompts import TruncationSide
from trio_pool_serve.rendering.text.fast_tokenizer import FastTokenizer, end_texts
from trio_pool_serve.rendering.text.slow_tokenizer import SlowTokenizer, named_ids
from trio_pool_serve.rendering.text.tokenizer import ModelChatTemplates, Tokenizer
from trio_pool_serve.storage.model_cache import CacheEntry, ModelCache, RecordBase, installed_versions

logger = logging.getLogger(__name__)

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
"""The special tokens that each class always has: the files must name them."""

WITH_SEGMENTS = "BertTokenizer"
"""The class of ``CLASSES`` whose models have segments unless the files say otherwise."""

REPLACED: Mapping[str, str] = {
    "qwen2": "Qwen2Tokenizer",
    "qwen3_5": "Qwen3_5Tokenizer",
    "qwen3_5_moe": "Qwen3_5Tokenizer",
    "siglip2": "Siglip2Tokenizer",
}
"""The class that transformers uses for a model type, whatever class the files name."""

TOKEN_FLAGS = ("content", "lstrip", "rstrip", "normalized", "single_word", "special")

_versions = partial(installed_versions, "transformers", "tokenizers")
"""Returns the versions of the libraries that make tokenizers."""


@frozen(kw_only=True)
class TokenizerRecord(RecordBase):
    """The parts of a ``FastTokenizer`` that are not in the library's own file.

    ``splits_special_tokens``: special tokens in a text are tokenised like other text.
    """

    special_ids: list[int]
    named_ids: dict[str, int]
    has_segments: bool
    truncation_side: TruncationSide
    chat: ModelChatTemplates
    splits_special_tokens: bool = False

    def tokenizer(self, backend: tokenizers.Tokenizer) -> FastTokenizer:
        """Return the tokenizer, which owns ``backend``."""
        backend.encode_special_tokens = self.splits_special_tokens
        return FastTokenizer(
            backend,
            frozenset(self.special_ids),
            {name: index for name, index in self.named_ids.items() if backend.id_to_token(index) is not None},
            has_segments=self.has_segments,
            chat=self.chat,
            truncation_side=self.truncation_side,
        )


def _by_name(template: Any) -> dict[str, str]:
    """Return one or several chat templates by name."""
    if isinstance(template, list):
        return {each["name"]: each["template"] for each in template}
    if isinstance(template, dict):
        return template
    return {"default": template} if template else {}


def chat_templates_of(
    folder: AnyModelFolder, of_tokenizer: Any, special_tokens: Mapping[str, str]
) -> ModelChatTemplates:
    """Return a model's chat templates."""
    own = processor_template(folder.transformer_path) or of_tokenizer
    found = own if folder.chat_template is None else folder.chat_template
    return ModelChatTemplates(templates=_by_name(found), special_tokens=special_tokens)


def native_options(folder: AnyModelFolder) -> dict[str, Any]:
    """Return arguments of ``from_pretrained`` in place of a config.json whose names transformers does not read."""
    if folder.native_config is None:
        return {}
    # Imported here: it takes seconds.
    from transformers import CONFIG_MAPPING

    return {"config": CONFIG_MAPPING[folder.model_type].from_dict(dict(folder.native_config))}


def load_tokenizer(
    folder: AnyModelFolder, *, trust_remote_code: bool = False, cache: ModelCache | None = None
) -> Tokenizer:
    """Load the tokenizer of a model's folder.

    For some kinds of model it is tokenizer.json alone. Else a tokenizer of the ``tokenizers`` library is written to the
    cache, from which later calls read it in milliseconds. Other tokenizers, and a first call, import transformers.
    Blocks; raises ``ModelLoadError``.
    """
    if folder.routes:
        of_routes = [load_tokenizer(each, trust_remote_code=trust_remote_code, cache=cache) for each in folder.routes]
        chosen: Tokenizer = of_routes[folder.spec.route_numbers.get(None, 0)]
        chosen.routes = of_routes
        return chosen
    if folder.spec.reads_tokenizer_file:
        return _of_file(folder)
    entry = None
    if cache is not None:
        with suppress(OSError):  # of files that need not be read to load the tokenizer
            own = folder.transformer_path.resolve().relative_to(folder.path.resolve())
            facts = own, folder.lower_case, folder.spec.marker_tokens, folder.chat_template, trust_remote_code
            kind = "tokenizer", repr((*facts, folder.end_token))
            entry = model_entry(folder.path, cache, *kind, suffixes=SMALL_FILES, part="-tokenizer")
    if entry is None:
        return _load(folder, None, trust_remote_code=trust_remote_code)
    if (cached := _read(entry)) is not None:
        return cached
    with entry.locked():
        return _read(entry) or _load(folder, entry, trust_remote_code=trust_remote_code)


def _of_file(folder: AnyModelFolder) -> Tokenizer:
    """Return the tokenizer of tokenizer.json. Raises ``ModelLoadError``, also for tokens beyond the vocabulary."""
    path = folder.transformer_path / FILE
    try:
        backend = tokenizers.Tokenizer.from_str(read_text(path))
    except Exception as error:  # the library has no narrower type
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    require_rows(backend.get_vocab(), path, folder.vocab_size)
    direction = (backend.truncation or {}).get("direction", "right")
    special_ids = frozenset(index for index, token in backend.get_added_tokens_decoder().items() if token.special)
    return FastTokenizer(backend, special_ids, has_segments=False, truncation_side=direction)


def _read(entry: CacheEntry) -> Tokenizer | None:
    """Return the tokenizer of an entry; ``None`` if other versions, of an installed transformers, made it."""
    record, installed = entry.read(TokenizerRecord), _versions()
    if record is None or ("transformers" in installed and installed != record.versions):
        return None
    try:
        return record.tokenizer(tokenizers.Tokenizer.from_file(str(entry.path / FILE)))
    except Exception as error:  # the library has no narrower type
        logger.warning("%s cannot be read: %s", entry.path, error)
        return None


def _load(folder: AnyModelFolder, entry: CacheEntry | None, *, trust_remote_code: bool) -> Tokenizer:
    """Load a tokenizer with transformers, and write it to the cache if later calls can read it from there.

    Without transformers it is read from its files, if they suffice. Raises ``ModelLoadError``.
    """
    if "transformers" not in _versions():
        backend, record = read_tokenizer(folder, trust_remote_code=trust_remote_code)
        return record.tokenizer(_adapted(backend, folder))
    import_transformers()
    if folder.native_config is None and not trust_remote_code:
        path = folder.transformer_path / "config.json"
        require_supported_type(str(path), read_json(path))
    # Imported here: it takes seconds and imports torch.
    from transformers import AutoTokenizer

    try:
        loaded: Any = AutoTokenizer.from_pretrained(
            folder.transformer_path,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            **native_options(folder),
        )
    except Exception as error:
        if not any(folder.transformer_path.glob("vocab*")):
            require_tokenizer_files(folder.transformer_path, {"tokenizer_file": FILE})
        how = f" {install_extra('japanese')}" if re.search("fugashi|unidic_lite|ipadic", str(error)) else ""
        raise ModelLoadError(f"The tokenizer of {folder.transformer_path} cannot be loaded: {error}{how}") from error
    require_tokenizer_files(folder.transformer_path, loaded.vocab_files_names)
    special_tokens = {name: str(token) for name, token in loaded.special_tokens_map.items()}
    has_segments = "token_type_ids" in loaded.model_input_names
    chat = chat_templates_of(folder, loaded.chat_template, special_tokens)
    if not loaded.is_fast:
        loaded.add_tokens(_markers(folder, loaded.get_vocab, loaded.tokenize), special_tokens=True)
        require_rows(loaded.get_vocab(), folder.transformer_path, folder.vocab_size)
        return SlowTokenizer(
            loaded,
            folder.lower_case,
            has_segments=has_segments,
            chat=chat,
            truncation_side=loaded.truncation_side,
        )
    backend = _adapted(loaded.backend_tokenizer, folder)
    record = TokenizerRecord(
        what=f"tokenizer of {folder.path}",
        versions=_versions(),
        special_ids=sorted({*loaded.all_special_ids} - {None}),
        named_ids=named_ids(loaded),
        has_segments=has_segments,
        truncation_side=loaded.truncation_side,
        chat=chat,
        splits_special_tokens=loaded.backend_tokenizer.encode_special_tokens,
    )
    if entry is not None and type(loaded).__module__.startswith("transformers."):
        entry.put(partial(_write, backend, record))
    return record.tokenizer(backend)


def _write(backend: tokenizers.Tokenizer, record: TokenizerRecord, folder: Path) -> TokenizerRecord:
    """Write a tokenizer to a folder of the cache; return its record. Raises ``StorageError``."""
    try:
        backend.save(f"{folder}/{FILE}", pretty=False)
    except Exception as error:  # the library has no narrower type: for parts in Python, and for a full disk
        raise StorageError(f"{record.what}: {error}") from error
    return record


def _adapted(backend: tokenizers.Tokenizer, folder: AnyModelFolder) -> tokenizers.Tokenizer:
    """Return the tokenizer for the model's table, with the settings of its other files: lower case, marker tokens."""
    backend.no_truncation()
    backend.no_padding()
    backend = fit_vocabulary(backend, folder.transformer_path, folder.vocab_size)
    if folder.lower_case:
        normalizer = backend.normalizer
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([normalizer] if normalizer else [])])
    if folder.end_token is not None:
        end_texts(backend, folder.end_token)
    backend.add_special_tokens(
        _markers(folder, backend.get_vocab, lambda text: backend.encode(text, add_special_tokens=False).tokens)
    )
    return backend


def _markers(
    folder: AnyModelFolder, vocabulary: Callable[[], dict[str, int]], tokenize: Callable[[str], list[str]]
) -> list[tokenizers.AddedToken]:
    """Return the marker tokens, or their first words, that are in the vocabulary but tokenised as several tokens.

    ``[unused0]`` is in BERT's vocabulary, but is tokenised as ``[``, ``unused`` and so on. Others stay ordinary text.
    """
    markers = [*filter(str.strip, folder.spec.marker_tokens)]
    known = vocabulary() if markers else {}
    found = [next((text for text in (marker, marker.split()[0]) if text in known), None) for marker in markers]
    return [
        tokenizers.AddedToken(token, normalized=False, special=True)
        for token in found
        if token is not None and tokenize(token) != [token]
    ]


def read_tokenizer(folder: AnyModelFolder, *, trust_remote_code: bool) -> tuple[tokenizers.Tokenizer, TokenizerRecord]:
    """Return the tokenizer of a folder's tokenizer.json, and its record.

    Raises ``ModelLoadError`` with the reason if that needs transformers.
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
    except Exception as error:  # the library has no narrower type
        fault = f"its files cannot be read: {error}"
    raise ModelLoadError(
        f"The tokenizer of {own} cannot be loaded without transformers: {fault}. Run pip install transformers"
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
    """Return why tokenizer.json does not determine the tokenizer that transformers would make; empty if it does."""
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
    declared = {int(index): _flags(token) for index, token in (config.get("added_tokens_decoder") or {}).items()}
    if declared not in ({}, added):
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
