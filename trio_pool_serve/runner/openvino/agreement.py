"""How near two computations of one model are to each other: cosines of their outputs, row by row."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.openvino.converted_model import COMPARED, LONGEST_COMPARED, as_vectors
from trio_pool_serve.runner.transformer_runner import TransformerRunner
from trio_pool_serve.types import (
    Batch,
    Classify,
    CopiedBatch,
    PooledValue,
    PoolingParams,
    PoolingRequest,
    RenderedPrompt,
    Runner,
)

SHORT = (33, 12, 5, 1)
"""Lengths of the rows of a batch; none is the length of the converter's example."""

LONG_COST = 1e11
"""Tokens times parameters of the longest row to compare on: about two seconds of torch on two cores."""

BEYOND_WINDOW = 40
"""Tokens of a row beyond the window of the model's sliding attention."""


def short_batch(backbone: Backbone, max_tokens: int, marker: int | None = None) -> list[RenderedPrompt]:
    """Return short rows of random tokens, the same on each call; every third token is ``marker``, if any."""
    return _random_rows(backbone, [min(length, max_tokens) for length in SHORT], marker)


def all_batches(backbone: Backbone, max_tokens: int, marker: int | None = None) -> list[list[RenderedPrompt]]:
    """Return ``short_batch`` and one with a row that is as long as the model allows, or as time allows.

    Beside it is a short row, whose padding lies beyond the window of sliding attention.
    """
    config: Any = backbone.model.config
    of_text = config.get_text_config()
    window = getattr(of_text, "sliding_window", None) or getattr(of_text, "local_attention", None) or 0
    affordable = max(64, int(LONG_COST / backbone.parameters), int(window) + BEYOND_WINDOW)
    long = min(max_tokens, LONGEST_COMPARED, affordable)
    return [short_batch(backbone, max_tokens, marker), _random_rows(backbone, [long, min(3, max_tokens)], marker)]


def _random_rows(backbone: Backbone, lengths: Sequence[int], marker: int | None) -> list[RenderedPrompt]:
    random = np.random.default_rng(0)
    config: Any = backbone.model.config
    segments = getattr(config, "type_vocab_size", 0) if backbone.takes_type_ids else 0

    def row(length: int) -> RenderedPrompt:
        ids = random.integers(backbone.vocab_size, size=length).astype(np.int32)
        if marker is not None:
            ids[::3] = marker
        types = np.sort(random.integers(segments, size=length)).astype(np.int32) if segments > 1 else None
        return RenderedPrompt(ids, type_ids=types)

    return [row(length) for length in lengths]


def agreement(
    ours: Runner, expected: TransformerRunner, batches: Iterable[Sequence[RenderedPrompt]]
) -> npt.NDArray[np.float64]:
    """Return the cosines of two runners' values for all params that are compared: one or more for each row."""
    compared = [params for params in COMPARED if type(params) in expected.heads]
    return np.array(
        [
            cosine
            for batch in batches
            for params in compared
            for cosine in _cosines(_values(ours, batch, params), _values(expected, batch, params), params)
        ]
    )


def _values(runner: Runner, prompts: Sequence[RenderedPrompt], params: PoolingParams) -> list[PooledValue]:
    computed = runner.launch(Batch(tuple(PoolingRequest(prompt, (params,)) for prompt in prompts)))
    assert isinstance(computed, CopiedBatch)  # noqa: S101  (on CPU)
    return [values[0] for values in computed.rows]


def _cosines(ours: Sequence[PooledValue], expected: Sequence[PooledValue], params: PoolingParams) -> Iterator[float]:
    pairs = list(map(as_vectors, ours, expected))
    if isinstance(params, Classify):  # a single row may have a single number
        pairs = [(np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs]))]
    for a, b in pairs:
        size = float(np.linalg.norm(a) * np.linalg.norm(b))
        yield float(a @ b) / size if size else float(np.array_equal(a, b))
