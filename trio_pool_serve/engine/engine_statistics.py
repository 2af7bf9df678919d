"""The state and the load of an engine."""

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

from attrs import frozen

EngineState: TypeAlias = Literal["loading", "ready", "stalled", "dead"]
"""stalled: ready, but nothing comes back: a row that is submitted now may wait for long."""

ENGINE_STATES: tuple[EngineState, ...] = get_args(EngineState)


@frozen
class QueueStatistics:
    """The state of an engine at one moment, and what waits for it in this process."""

    state: EngineState
    queued_rows: int
    queued_tokens: int
    admitted_tokens: int = 0
    """Tokens of the requests that are admitted and not computed; an estimate for those that are not rendered."""
    waiting_s: float = 0.0
    """Seconds that all admitted work will take, at the measured rates; 0 before the first batch."""

    def gauges(self) -> dict[str, dict[str, float]]:
        """Return what the engine's metrics have of it."""
        return {
            "engine": {
                "queued_rows": self.queued_rows,
                "queued_tokens": self.queued_tokens,
                "admitted_tokens": self.admitted_tokens,
                "waiting_seconds": self.waiting_s,
            }
        }


@frozen(kw_only=True)
class LinkStatistics(QueueStatistics):
    """The state of an engine that is computed in other processes, which report their load themselves."""

    replicas: Mapping[str, Mapping[str, EngineState]]
    """The states of stalled replicas, by number: they cannot report that they are silent."""


@frozen(kw_only=True)
class EngineStatistics(QueueStatistics):
    """The state and the load of an engine at one moment, in the process that computes."""

    in_flight_batches: int
    oldest_in_flight_s: float
    """Seconds since the oldest launched batch was launched; 0 with none in flight."""
    tokens_per_s: float
    """Tokens computed per second, as a moving average; 0 before the first batch."""
    batches: int
    failed_batches: int
    batch_token_budget: int
    """The current token budget of a batch: less than configured after the device ran out of memory; 0 if unknown."""
    memory_bytes: int
    """Resident memory that the model takes."""

    def gauges(self) -> dict[str, dict[str, float]]:
        """Return what the engine's metrics have of it."""
        device = {
            "ready": float(self.state == "ready"),
            "stalled": float(self.state == "stalled"),
            "in_flight_batches": self.in_flight_batches,
            "oldest_in_flight_seconds": self.oldest_in_flight_s,
            "batch_token_budget": self.batch_token_budget,
        }
        return {"engine": super().gauges()["engine"] | device}
