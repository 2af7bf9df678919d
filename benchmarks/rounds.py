"""What several rounds of measuring gave: medians, and ratios within each round."""

from collections.abc import Hashable
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

    def ratio(self, key: Key, quantity: str, base: Key, base_quantity: str | None = None) -> float:
        """Return a quantity over another's: the median of each round's ratio."""
        return median(self._pairs(key, quantity, base, base_quantity, lambda value, of_base: value / of_base))

    def difference(self, key: Key, quantity: str, base: Key, base_quantity: str | None = None) -> float:
        """Return a quantity less another: the median of each round's difference."""
        return median(self._pairs(key, quantity, base, base_quantity, lambda value, of_base: value - of_base))

    def _pairs(self, key: Key, quantity: str, base: Key, base_quantity: str | None, combine: Any) -> list[float]:
        pairs = zip(self.results[key], self.results[base], strict=True)
        return [
            combine(getattr(result, quantity), getattr(of_base, base_quantity or quantity)) for result, of_base in pairs
        ]

    def as_document(self, *names: str) -> list[dict[str, Any]]:
        """Return everything for JSON; ``names`` are those of the parts of a key."""
        return [
            {
                **dict(zip(names, key if isinstance(key, tuple) else (key,), strict=True)),
                "rounds": [attrs.asdict(result) for result in results],
            }
            for key, results in self.results.items()
        ]
