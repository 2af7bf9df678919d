"""How near two computations of one model are to each other: cosines of their outputs, row by row."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.openvino.converted_model import LONGEST_COMPARED
from trio_pool_serve.types import (
    Batch,
    Classify,
    CopiedBatch,
    Embed,
    PooledValue,
    PoolingParams,
    PoolingRequest,
    RenderedPrompt,
    Runner,
    SparseEmbed,
    SparseVector,
    TokenClassify,
    TokenEmbed,
)

SHORT = ((33, 12, 5, 1),)
"""Lengths of the rows of a batch; none is that of the converter's example."""

LONG_COST = 1e11
"""Tokens times parameters of the longest row to compare on: about two seconds of torch on two cores."""

BEYOND_WINDOW = 40
"""Tokens of a row beyond the window of the model's sliding attention."""

COMPARED: tuple[PoolingParams, ...] = (
    Embed(normalize=False),
    TokenEmbed(normalize=False),
    SparseEmbed(),
    Classify("raw"),
    TokenClassify("raw"),
)
"""The params whose values are compared, of a model that has their heads."""


@frozen
class Agreement:
    """The mean and the lowest of some rows' cosines."""

    mean: float
    lowest: float


def short_batches(backbone: Backbone, max_tokens: int, marker: int | None = None) -> list[list[RenderedPrompt]]:
    """Return a batch of short rows of random tokens, the same on each call; every third token is ``marker``, if any."""
    return _random_batches(backbone, [[min(length, max_tokens) for length in lengths] for lengths in SHORT], marker)


def all_batches(backbone: Backbone, max_tokens: int, marker: int | None = None) -> list[list[RenderedPrompt]]:
    """Return ``short_batches`` and one with a row that is as long as the model allows, or as time allows.

    Beside it is a short row, whose padding lies beyond the window of sliding attention.
    """
    affordable = max(64, int(LONG_COST / backbone.parameters), _window(backbone) + BEYOND_WINDOW)
    long = min(max_tokens, LONGEST_COMPARED, affordable)
    of_long = _random_batches(backbone, [[long, min(3, max_tokens)]], marker)
    return [*short_batches(backbone, max_tokens, marker), *of_long]


def _window(backbone: Backbone) -> int:
    """Return the size of the window of the model's sliding attention, 0 if it has none."""
    config: Any = backbone.model.config
    text_config = config.get_text_config()
    return int(getattr(text_config, "sliding_window", None) or getattr(text_config, "local_attention", None) or 0)


def _random_batches(
    backbone: Backbone, lengths: Sequence[Sequence[int]], marker: int | None
) -> list[list[RenderedPrompt]]:
    random = np.random.default_rng(0)
    config: Any = backbone.model.config
    segments = getattr(config, "type_vocab_size", 0) if backbone.takes_type_ids else 0

    def row(length: int) -> RenderedPrompt:
        ids = random.integers(backbone.vocab_size, size=length).astype(np.int32)
        if marker is not None:
            ids[::3] = marker
        types = np.sort(random.integers(segments, size=length)).astype(np.int32) if segments > 1 else None
        return RenderedPrompt(ids, type_ids=types)

    return [[row(length) for length in batch] for batch in lengths]


def agreement(
    ours: Runner, expected: Runner, batches: Iterable[Sequence[RenderedPrompt]], compared: Sequence[PoolingParams]
) -> Agreement:
    """Return the cosines of two runners' values for ``compared`` params. A NaN in any of them makes both NaN."""
    cosines = np.array(
        [cosine for batch in batches for params in compared for cosine in _cosines(ours, expected, batch, params)]
    )
    return Agreement(float(cosines.mean()), float(cosines.min()))


def _cosines(ours: Runner, expected: Runner, batch: Sequence[RenderedPrompt], params: PoolingParams) -> Iterator[float]:
    rows = Batch(tuple(PoolingRequest(prompt, (params,)) for prompt in batch))
    values = zip(values_of(ours, rows), values_of(expected, rows), strict=True)
    pairs = [_as_vectors(*pair) for pair in values]
    if isinstance(params, Classify):  # a single row may have a single number
        pairs = [(np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs]))]
    for a, b in pairs:
        size = float(np.linalg.norm(a) * np.linalg.norm(b))
        yield float(a @ b) / size if size else float(np.array_equal(a, b))


def values_of(runner: Runner, batch: Batch) -> list[PooledValue]:
    """Return the value of each row's first params; the runner computes on CPU."""
    computed = runner.launch(batch)
    assert isinstance(computed, CopiedBatch)  # noqa: S101
    return [values[0] for values in computed.rows]


def _as_vectors(ours: PooledValue, expected: PooledValue) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    if isinstance(ours, SparseVector) and isinstance(expected, SparseVector):
        size = max(ours.indices.max(initial=0), expected.indices.max(initial=0)) + 1
        dense = np.zeros((2, size))
        dense[0, ours.indices], dense[1, expected.indices] = ours.values, expected.values
        return dense[0], dense[1]
    return np.asarray(ours, np.float64).ravel(), np.asarray(expected, np.float64).ravel()
