"""The bodies of requests, by route."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trio_pool_serve.errors import PoolServeError
from trio_pool_serve.load.bench_command import RequestOptions

COMMON_WORDS = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not
what all were we when your can said there use an each which she do how their if will up other about out many then them
these so some her would make like him into time has look two more write go see number no way could people my than
first water been call who oil its now find long down day did get come made may part over new sound take only little
work know place year live me back give most very after thing our just name good sentence man think say great where
help through much before line right too mean old any same tell boy follow came want show
"""
"""The commonest words of English, of which tokenizers make one token each."""

SPECIAL_TOKENS = 2
"""That most models add to a text."""

BODIES = 512
"""Different bodies of random texts: servers may keep the results of texts that they have seen."""

MAX_FILE_BYTES = 256 * 2**20


class BenchError(PoolServeError):
    """The requests cannot be made; the message is for the user at the terminal."""


def _input(texts: Sequence[str]) -> dict[str, Any]:
    return {"input": texts[0] if len(texts) == 1 else list(texts)}


ROUTES: Mapping[str, Callable[[Sequence[str]], dict[str, Any]]] = {
    "/embeddings": _input,
    "/pooling": _input,
    "/classify": _input,
    "/rerank": lambda texts: {"query": texts[0], "documents": list(texts[1:])},
    "/score": lambda texts: {"text_1": texts[0], "text_2": list(texts[1:])},
    "/embed": lambda texts: {"inputs": list(texts)},
}
"""By the last part of a route's path."""

WITH_QUERY = frozenset({"/rerank", "/score"})


def bodies_of(options: RequestOptions, model: str | None) -> list[bytes]:
    """Return the bodies of the requests that are sent in turns. Blocks. Raises ``BenchError``."""
    if options.body_file is not None:
        return [line.encode() for line in _lines_of(options.body_file)]
    kind = "/" + options.route.rpartition("/")[2]
    make = ROUTES.get(kind)
    if make is None:
        known = ", ".join(ROUTES)
        raise BenchError(f"--route {options.route}: its body is not known. Known are {known}; others take --body-file.")
    named = {} if model is None else {"model": model}
    size = options.texts + (kind in WITH_QUERY)
    texts = _texts(options, size)
    return [json.dumps({**named, **make(texts[begin : begin + size])}).encode() for begin in range(0, len(texts), size)]


def _texts(options: RequestOptions, size: int) -> list[str]:
    """Return random texts for whole requests of ``size`` texts, the same in each run."""
    vocabulary = COMMON_WORDS.split()
    choose = random.Random(0)  # noqa: S311  (for texts)
    words = max(1, options.tokens - SPECIAL_TOKENS)
    bodies = max(1, min(BODIES, MAX_FILE_BYTES // (8 * words * size)))
    return [" ".join(choose.choices(vocabulary, k=words)) for _ in range(bodies * size)]


def _lines_of(path: Path) -> list[str]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BenchError(f"{path} has more than {MAX_FILE_BYTES} bytes.")
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path} cannot be read: {error}") from error
    if not lines:
        raise BenchError(f"{path} has no lines.")
    return lines
