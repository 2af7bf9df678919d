"""Loading the tokenizer of a model's folder: from the cache, or by transformers, which is imported only then."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence

from trio_pool_serve.errors import ModelLoadError, StorageError
from trio_pool_serve.models.files.model_digest import tokenizer_entry
from trio_pool_serve.models.loading.runner_loader import import_transformers
from trio_pool_serve.models.loading.tokenizer_files import FILE, read_tokenizer
from trio_pool_serve.models.loading.tokenizer_record import TokenizerRecord, chat_templates_of
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.rendering.text.slow_tokenizer import SlowTokenizer, named_ids
from trio_pool_serve.rendering.text.tokenizer import Tokenizer
from trio_pool_serve.storage.model_cache import CacheEntry, ModelCache, installed_versions

logger = logging.getLogger(__name__)

_versions = partial(installed_versions, "transformers", "tokenizers")
"""Returns the versions of the libraries that make tokenizers."""


def load_tokenizer(
    folder: AnyModelFolder, *, trust_remote_code: bool = False, cache: ModelCache | None = None
) -> Tokenizer:
    """Load the tokenizer of a model's folder.

    A tokenizer of the ``tokenizers`` library is written to the cache, from which later calls read it in milliseconds.
    Other tokenizers, and a first call, import transformers. Blocks; raises ``ModelLoadError``.
    """
    entry = None if cache is None else _entry(cache, folder, trust_remote_code=trust_remote_code)
    if entry is None:
        return _load(folder, None, trust_remote_code=trust_remote_code)
    if (cached := _read(entry)) is not None:
        return cached
    with entry.locked():
        return _read(entry) or _load(folder, entry, trust_remote_code=trust_remote_code)


def _entry(cache: ModelCache, folder: AnyModelFolder, *, trust_remote_code: bool) -> CacheEntry | None:
    """Return the entry of a tokenizer: of the model's files, and of what is done to it here.

    ``None`` if one of the files cannot be read.
    """
    facts = folder.lower_case, folder.spec.marker_tokens, folder.chat_template, trust_remote_code
    try:
        return tokenizer_entry(folder.path, cache, repr(facts))
    except OSError:
        return None


def _read(entry: CacheEntry) -> Tokenizer | None:
    """Return the tokenizer of an entry, unless transformers is installed and would make it anew by other versions."""
    record, installed = entry.read(TokenizerRecord), _versions()
    if record is None or ("transformers" in installed and installed != record.versions):
        return None
    try:
        return record.tokenizer(tokenizers.Tokenizer.from_file(str(entry.path / FILE)))
    except Exception as error:  # all that the library raises
        logger.warning("%s cannot be read: %s", entry.path, error)
        return None


def _load(folder: AnyModelFolder, entry: CacheEntry | None, *, trust_remote_code: bool) -> Tokenizer:
    """Load a tokenizer by transformers, and publish it if later calls can do without.

    Without transformers it is read from its files, if they say all. Raises ``ModelLoadError``.
    """
    if "transformers" not in _versions():
        backend, record = read_tokenizer(folder, trust_remote_code=trust_remote_code)
        _adapt(backend, folder)
        return record.tokenizer(backend)
    import_transformers()
    # Imported here: it takes seconds and imports torch.
    from transformers import AutoTokenizer

    try:
        loaded: Any = AutoTokenizer.from_pretrained(
            folder.transformer_path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        raise ModelLoadError(f"The tokenizer of {folder.transformer_path} cannot be loaded: {error}") from error
    special_tokens = {name: str(token) for name, token in loaded.special_tokens_map.items()}
    has_segments = "token_type_ids" in loaded.model_input_names
    chat = chat_templates_of(folder, loaded.chat_template, special_tokens)
    if not loaded.is_fast:
        loaded.add_tokens(_markers(folder, loaded.get_vocab, loaded.tokenize), special_tokens=True)
        return SlowTokenizer(loaded, folder.lower_case, has_segments, chat, loaded.truncation_side)
    backend = loaded.backend_tokenizer
    _adapt(backend, folder)
    record = TokenizerRecord(
        what=f"tokenizer of {folder.path}",
        versions=_versions(),
        special_ids=sorted({*loaded.all_special_ids} - {None}),
        named_ids=named_ids(loaded),
        has_segments=has_segments,
        truncation_side=loaded.truncation_side,
        chat=chat,
        splits_special_tokens=backend.encode_special_tokens,
    )
    if entry is not None and type(loaded).__module__.startswith("transformers."):
        _publish(entry, backend, record)
    return record.tokenizer(backend)


def _publish(entry: CacheEntry, backend: tokenizers.Tokenizer, record: TokenizerRecord) -> None:
    def write(folder: Path) -> TokenizerRecord:
        try:
            backend.save(f"{folder}/{FILE}", pretty=False)
        except Exception as error:  # all that the library raises: for parts written in Python, and for a full disk
            raise StorageError(f"{record.what}: {error}") from error
        return record

    entry.put(write)


def _adapt(backend: tokenizers.Tokenizer, folder: AnyModelFolder) -> None:
    """Add what a folder's files ask of its tokenizer beside the tokenizer's own files."""
    backend.no_truncation()
    backend.no_padding()
    if folder.lower_case:
        normalizer = backend.normalizer
        backend.normalizer = NormalizerSequence([Lowercase(), *([normalizer] if normalizer else [])])
    backend.add_special_tokens(
        _markers(folder, backend.get_vocab, lambda text: backend.encode(text, add_special_tokens=False).tokens)
    )


def _markers(
    folder: AnyModelFolder, vocabulary: Callable[[], dict[str, int]], tokenize: Callable[[str], list[str]]
) -> list[tokenizers.AddedToken]:
    """Return marker tokens, or their first words, that the vocabulary has, but that are tokenised as several tokens.

    ``[unused0]`` is in BERT's vocabulary, but is tokenised as ``[``, ``unused`` and so on. Others stay ordinary text.
    """
    split: list[tokenizers.AddedToken] = []
    if not (texts := [*filter(str.strip, folder.spec.marker_tokens)]):
        return split
    known = vocabulary()
    for marker in texts:
        token = next((text for text in (marker, marker.split()[0]) if text in known), None)
        if token is not None and tokenize(token) != [token]:
            split.append(tokenizers.AddedToken(token, normalized=False, special=True))
    return split
