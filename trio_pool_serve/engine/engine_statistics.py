"""The state and the load of an engine."""

from typing import Literal, TypeAlias, get_args

from attrs import frozen

from trio_pool_serve.telemetry.gauges import Gauges

EngineState: TypeAlias = Literal["loading", "ready", "stalled", "dead"]
"""stalled: ready, but nothing comes back: a row that is submitted now may wait for long."""

ENGINE_STATES: tuple[EngineState, ...] = get_args(EngineState)


@frozen
class EngineStatistics:
    """The state and the load of an engine at one moment; 0 for what other processes know."""

    state: EngineState
    queued_rows: int = 0
    queued_tokens: int = 0
    in_flight_batches: int = 0
    oldest_in_flight_s: float = 0.0
    """Seconds since the oldest launched batch was launched; 0 with none in flight."""
    admitted_tokens: int = 0
    """Tokens of the requests that are admitted and not computed; an estimate for those that are not rendered."""
    waiting_s: float = 0.0
    """Seconds that all admitted work will take, at the measured rates; 0 before the first batch."""
    tokens_per_s: float = 0.0
    """Tokens computed per second, as a moving average; 0 before the first batch."""
    batches: int = 0
    failed_batches: int = 0
    batch_token_budget: int = 0
    """The current token budget of a batch: less than configured after the device ran out of memory; 0 if unknown."""

    def gauges(self) -> Gauges:
        """Return what the engine's metrics have."""
        return {
            "engine": {
                "ready": float(self.state == "ready"),
                "stalled": float(self.state == "stalled"),
                "queued_rows": self.queued_rows,
                "queued_tokens": self.queued_tokens,
                "in_flight_batches": self.in_flight_batches,
                "oldest_in_flight_seconds": self.oldest_in_flight_s,
                "admitted_tokens": self.admitted_tokens,
                "waiting_seconds": self.waiting_s,
                "batch_token_budget": self.batch_token_budget,
            }
        }
