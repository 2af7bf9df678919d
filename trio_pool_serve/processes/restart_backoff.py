"""Pauses between restarts."""

from collections.abc import Sequence

from attrs import define, field


@define
class RestartBackoff:
    """The pauses before restarts: ``pauses_s`` in order (seconds), then the last one again and again.

    After a run of more than ``stable_after_s`` seconds they begin again. The defaults suit child processes.
    """

    pauses_s: Sequence[float] = (0.0, 1.0, 2.0, 5.0, 15.0, 30.0)
    stable_after_s: float = 60.0
    crashes_in_a_row: int = field(default=0, init=False)

    def next_pause_s(self, ran_s: float) -> float:
        """Return how many seconds to wait after a crash that ended a run of ``ran_s`` seconds."""
        if ran_s > self.stable_after_s:
            self.crashes_in_a_row = 0
        pause_s = self.pauses_s[min(self.crashes_in_a_row, len(self.pauses_s) - 1)]
        self.crashes_in_a_row += 1
        return pause_s
