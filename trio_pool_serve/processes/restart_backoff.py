"""The pauses between restarts of what keeps crashing."""

from collections.abc import Sequence

from attrs import define, field


@define
class RestartBackoff:
    """Returns the pause before each restart: ``pauses_s`` in their order (seconds), the last one repeated.

    A run of more than ``stable_after_s`` seconds begins them again.
    """

    pauses_s: Sequence[float]
    stable_after_s: float
    _crashes: int = field(default=0, init=False)
    """Crashes in a row."""

    def next_pause_s(self, ran_s: float) -> float:
        """Return how many seconds to wait after a crash that ended a run of ``ran_s`` seconds."""
        if ran_s > self.stable_after_s:
            self._crashes = 0
        pause_s = self.pauses_s[min(self._crashes, len(self.pauses_s) - 1)]
        self._crashes += 1
        return pause_s
