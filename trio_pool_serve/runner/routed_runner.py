"""The runner of a model with several routes: one runner for each of them."""

from collections.abc import Sequence

from attrs import evolve, field, frozen

from trio_pool_serve.types import Batch, PooledBatch, Runner, RunnerFacts


@frozen(eq=False)
class RoutedRunner:
    """Computes each batch with the runner of its rows' route: the batch key keeps the rows of routes apart."""

    routes: Sequence[Runner]
    """By the routes' numbers."""
    facts: RunnerFacts = field(init=False)
    """The facts of the first route, with the parameters of all, and the least of their token budgets."""

    @facts.default
    def _facts(self) -> RunnerFacts:
        first, *others = all_facts = [route.facts for route in self.routes]
        return evolve(
            first,
            takes_adapters=False,
            max_batch_tokens=min(each.max_batch_tokens for each in all_facts),
            parameters=sum(each.parameters for each in all_facts),
            weight_bytes=sum(each.weight_bytes for each in all_facts),
            improvements=tuple(improvement for each in all_facts for improvement in each.improvements),
            computation=(*first.computation, *(f"beside a route of {other}" for other in others)),
        )

    def launch(self, batch: Batch) -> PooledBatch:
        """Compute the rows. Raises the errors of the route's runner."""
        return self.routes[batch.requests[0].prompt.route].launch(batch)

    def return_memory(self) -> None:
        """Free memory of all routes."""
        for route in self.routes:
            route.return_memory()
