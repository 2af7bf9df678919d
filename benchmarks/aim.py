"""What a benchmark aims at."""

from attrs import frozen

COLUMNS = ("bar", "aim", "measured", "reached")
"""The columns of a table of aims after the names."""


@frozen(kw_only=True)
class Aim:
    """A row with its bar, a lower or upper limit, or none if the number is only shown; ``aim`` is a better value."""

    row: str
    at_least: float | None = None
    at_most: float | None = None
    aim: float | None = None

    @property
    def limit(self) -> str:
        """The bar in words."""
        return self._limit(self.at_most if self.at_least is None else self.at_least)

    def is_reached(self, value: float) -> bool | None:
        """Return whether a value is within the bar; ``None`` without one."""
        if self.at_least is not None:
            return value >= self.at_least
        return None if self.at_most is None else value <= self.at_most

    def cells(self, value: float) -> list[str]:
        """Return the row of a table: its name and ``COLUMNS``."""
        is_there = self.aim is not None and (value >= self.aim if self.at_least is not None else value <= self.aim)
        reached = {None: "–", False: "NO", True: "yes" if self.aim is None or is_there else "bar"}
        return [self.row, self.limit, self._limit(self.aim), f"{value:.3g}", reached[self.is_reached(value)]]

    def _limit(self, value: float | None) -> str:
        return "–" if value is None else f"{'≤' if self.at_least is None else '≥'} {value:,.10g}"
