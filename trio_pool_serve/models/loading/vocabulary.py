"""Whether a folder has a tokenizer whose vocabulary is that of the model's table of token embeddings."""

import json
import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import tokenizers

from trio_pool_serve.errors import require

logger = logging.getLogger(__name__)


def require_tokenizer_files(place: Path, names: Mapping[str, str]) -> None:
    """Raise ``ModelLoadError`` if a folder lacks the files of its tokenizer: transformers makes an empty one then.

    ``names`` are the files that the tokenizer's class reads, by purpose; empty for classes without files (ByT5).
    """
    needed = names.get("vocab_file", "tokenizer.json")
    wholes = r"tokenizer\.json|tekken\.json|.*\.(model|spm|tiktoken)"
    require(
        not names or any(path.name == needed or re.fullmatch(wholes, path.name) for path in place.iterdir()),
        f"{place} contains no {needed}: without a vocabulary, all texts would get the same vector. Complete the "
        "download, or copy the tokenizer's files from the model that this one is based on.",
    )


def fit_vocabulary(backend: tokenizers.Tokenizer, place: Path, rows: int) -> tokenizers.Tokenizer:
    """Return the tokenizer without the added tokens that have no row in the table: they become ordinary text.

    EmbeddingGemma has one, for images. Raises ``ModelLoadError`` as ``require_rows``, also for tokens that are added
    to every text.
    """
    beyond = {index: token.content for index, token in backend.get_added_tokens_decoder().items() if index >= rows}
    unusable = {beyond[index] for index in beyond.keys() - backend.encode("").ids}
    if unusable:
        logger.warning(
            "%s: the model has %d token embeddings, none for %s of its tokenizer: ordinary text.",
            place, rows, ", ".join(sorted(unusable)),
        )  # fmt: skip
        backend = _without(backend, unusable)
    require_rows(backend.get_vocab(), place, rows)
    return backend


def _without(backend: tokenizers.Tokenizer, tokens: Collection[str]) -> tokenizers.Tokenizer:
    document = json.loads(backend.to_str())
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] not in tokens]
    if isinstance(vocabulary := document["model"]["vocab"], dict):
        document["model"]["vocab"] = {token: index for token, index in vocabulary.items() if token not in tokens}
    return tokenizers.Tokenizer.from_str(json.dumps(document))


def require_rows(vocabulary: Mapping[str, int], place: Path, rows: int) -> None:
    """Raise ``ModelLoadError`` if tokens have no row in a table of ``rows``, or if less than a tenth of it is used."""
    beyond = sorted((token for token in vocabulary if vocabulary[token] >= rows), key=lambda token: vocabulary[token])
    require(
        not beyond,
        f"{place}: the tokenizer has ids up to {max(vocabulary.values(), default=0)}, but the model has {rows} token "
        f"embeddings, so {', '.join(map(repr, beyond[:3]))}{' and others' * (len(beyond) > 3)} cannot be computed. "
        "Use the tokenizer with which the model was trained.",
    )
    few = f"{place}: the tokenizer has {len(vocabulary)} tokens, but the model has {rows} token embeddings"
    require(10 * len(vocabulary) >= rows, f"{few}. Use the tokenizer with which the model was trained.")
    if 2 * len(vocabulary) < rows:
        logger.warning("%s. Is it the tokenizer with which the model was trained?", few)
