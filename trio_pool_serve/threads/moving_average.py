"""An average in which newer values count more."""

from attrs import define


@define
class MovingAverage:
    """The average of all values so far, in which each newer one has ``weight``; 0 before the first."""

    weight: float = 0.1
    value: float = 0.0
    is_known: bool = False

    def observe(self, value: float) -> None:
        """Add a value."""
        self.value += (value - self.value) * (self.weight if self.is_known else 1.0)
        self.is_known = True
