"""How clients' results are held against oracles'."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

LEAST_COSINE = 0.999999
LARGEST_SCORE_DIFFERENCE = 1e-4


def cosines(found: Any, expected: Any) -> npt.NDArray[np.float32]:
    """Return the cosine of each row with the row that was expected."""
    found, expected = np.asarray(found, dtype=np.float32), np.asarray(expected, dtype=np.float32)
    assert found.shape == expected.shape
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return (found * expected).sum(axis=1) / norms


def assert_same_directions(found: Any, expected: Any) -> None:
    """Each of the vectors, [rows, d], points where it should."""
    assert cosines(found, expected).min() >= LEAST_COSINE


def assert_same_ranking(found: Sequence[tuple[int, float]], scores: Any, top: int | None = None) -> None:
    """Indices and scores are those of the best ``top`` of ``scores``, best first."""
    best = np.argsort(-np.asarray(scores), kind="stable")[:top]
    assert [index for index, _ in found] == best.tolist()
    assert np.abs(np.array([score for _, score in found]) - np.asarray(scores)[best]).max() <= LARGEST_SCORE_DIFFERENCE


def assert_same_numbers(found: Any, expected: Any, dtype: str) -> None:
    """Vectors in one or eight bits per dimension are those that ``expected``, [rows, d], becomes.

    int8 may be one off: it is rounded from vectors that differ by as much as two runs of a model do.
    """
    expected = np.asarray(expected)
    scaled = expected / np.abs(expected).max(axis=1, keepdims=True) * 127
    bits = np.packbits(expected >= 0, axis=1).astype(int)
    wanted, tolerance = {
        "int8": (scaled, 1),
        "uint8": (scaled + 128, 1),
        "binary": (bits - 128, 0),
        "ubinary": (bits, 0),
    }[dtype]
    assert np.abs(np.array(found) - wanted).max() <= tolerance
