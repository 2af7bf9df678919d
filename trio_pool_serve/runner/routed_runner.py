"""The runner of a model with several routes: one runner for each of them."""

from collections.abc import Sequence
from typing import Any

from attrs import define, evolve

from trio_pool_serve.runner.runner_description import RunnerDescription
from trio_pool_serve.types import Batch, PooledBatch, Runner


@define(eq=False)
class RoutedRunner:
    """Computes each batch with the runner of its rows' route: the batch key keeps the rows of routes apart."""

    routes: Sequence[Runner]
    """By number. The first one stands for all in what is said of them."""

    takes_adapters = False

    def launch(self, batch: Batch) -> PooledBatch:
        """Compute the rows. Raises what the route's runner raises."""
        return self.routes[batch.requests[0].prompt.route].launch(batch)

    def prepare(self, wanted_batch_tokens: int | None) -> int:
        """Prepare all; return the least of their token budgets."""
        return min([route.prepare(wanted_batch_tokens) for route in self.routes])

    def return_memory(self) -> None:
        """Free memory of all."""
        for route in self.routes:
            route.return_memory()

    @property
    def description(self) -> RunnerDescription:
        """What the first one is, with the parameters of all; known once they are prepared."""
        descriptions: list[RunnerDescription] = [getattr(route, "description") for route in self.routes]  # noqa: B009
        first, *others = descriptions
        return evolve(
            first,
            parameters=first.parameters + sum(other.parameters for other in others),
            weight_bytes=first.weight_bytes + sum(other.weight_bytes for other in others),
            computation=(*first.computation, *(f"beside a route of {other}" for other in others)),
        )

    def describe(self) -> str:
        """Return one line for the log."""
        return str(self.description)

    def __getattr__(self, name: str) -> Any:
        """Return anything else that a ``Runner`` has: the first route's."""
        return getattr(self.routes[0], name)
