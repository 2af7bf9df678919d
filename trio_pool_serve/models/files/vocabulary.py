"""Looking tokens up in a tokenizer's files, without loading it."""

from collections.abc import Mapping
from typing import Any

from trio_pool_serve.models.files.folder_files import FolderFiles, read_json


def find_token_id(files: FolderFiles, token: str) -> int | None:
    """Return a token's id, ``None`` if the vocabulary lacks it. Raises ``ModelLoadError``."""
    folder = files.transformer_path
    added: Mapping[str, Mapping[str, Any]] = files.tokenizer_config.get("added_tokens_decoder") or {}
    for token_id, entry in added.items():
        if entry.get("content") == token:
            return int(token_id)
    document = read_json(folder / "tokenizer.json")
    for entry in document.get("added_tokens") or []:
        if entry.get("content") == token:
            return int(entry["id"])
    vocabularies: list[Any] = [
        (document.get("model") or {}).get("vocab"),
        read_json(folder / "vocab.json"),
        read_json(folder / "added_tokens.json"),
    ]
    for vocabulary in vocabularies:
        if isinstance(vocabulary, dict) and token in vocabulary:
            return int(vocabulary[token])
        if isinstance(vocabulary, list):  # unigrams: [piece, weight]
            return next((index for index, (piece, *_) in enumerate(vocabulary) if piece == token), None)
    return None
