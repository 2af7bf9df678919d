"""Results of several rounds: medians, and ratios within each round."""

from collections.abc import Hashable, Sequence
from statistics import median
from typing import Any, Generic, TypeVar

import attrs
from attrs import define, field

Key = TypeVar("Key", bound=Hashable)


@define
class Rounds(Generic[Key]):
    """Results by what was measured; of the same length for all, since everything is measured in every round."""

    results: dict[Key, list[Any]] = field(factory=dict)

    def add(self, key: Key, result: Any) -> None:
        """Take note of one more round's result."""
        self.results.setdefault(key, []).append(result)

    def median(self, key: Key, quantity: str) -> float:
        """Return the median of a quantity over the rounds; of a maximum, the largest."""
        values = [getattr(result, quantity) for result in self.results[key]]
        return max(values) if quantity == "max_ms" else median(values)

    def ratio(self, key: Key, quantity: str, base: Key) -> float:
        """Return a quantity over that of another key: the median of each round's ratio."""
        return median_ratio(self.results[key], quantity, self.results[base], quantity)

    def as_document(self, *names: str) -> list[dict[str, Any]]:
        """Return everything for JSON; ``names`` are those of the parts of a key."""
        return [
            {
                **dict(zip(names, key if isinstance(key, tuple) else (key,), strict=True)),
                "rounds": [attrs.asdict(result) for result in results],
            }
            for key, results in self.results.items()
        ]


def median_ratio(results: Sequence[Any], quantity: str, bases: Sequence[Any], base_quantity: str) -> float:
    """Return a quantity over one of something else measured in the same rounds: the median of each round's ratio."""
    pairs = zip(results, bases, strict=True)
    return median(getattr(result, quantity) / getattr(base, base_quantity) for result, base in pairs)


def median_difference(results: Sequence[Any], bases: Sequence[Any], quantity: str) -> float:
    """Return by how much a quantity is larger than in something else: the median of each round's difference."""
    pairs = zip(results, bases, strict=True)
    return median(getattr(result, quantity) - getattr(base, quantity) for result, base in pairs)
