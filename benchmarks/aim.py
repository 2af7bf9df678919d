"""What a benchmark aims at."""

from attrs import frozen


@frozen(kw_only=True)
class Aim:
    """What is aimed at: a limit on one side, or none if a number is only shown."""

    row: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def limit(self) -> str:
        """The limit in words."""
        if self.at_least is not None:
            return f"≥ {self.at_least:,.10g}"
        return "–" if self.at_most is None else f"≤ {self.at_most:,.10g}"

    def is_reached(self, value: float) -> bool | None:
        """Return whether a value is within the limit; ``None`` without one."""
        if self.at_least is not None:
            return value >= self.at_least
        return None if self.at_most is None else value <= self.at_most
