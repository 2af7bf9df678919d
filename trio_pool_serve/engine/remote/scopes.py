"""The scopes of held queries at both ends of a connection: queries are sent as two numbers."""

from collections.abc import Callable
from typing import Any

from attrs import define, field

from trio_pool_serve.types import HeldQuery, QueryScope


@define(eq=False)
class RemoteScope:
    """The API process's end of a scope: the queries of one request that an engine process holds.

    ``close`` calls ``closed``.
    """

    number: int
    closed: Callable[["RemoteScope"], None]
    _queries: dict[HeldQuery, int] = field(init=False, factory=dict)

    def number_of(self, query: HeldQuery) -> int:
        """Return the number by which a query is sent."""
        return self._queries.setdefault(query, len(self._queries))

    def close(self) -> None:
        """Have the engine process free the queries."""
        self.closed(self)


def numbers_of(value: object) -> list[int]:
    """Encode a query as two numbers, its scope's and its own. Raises ``TypeError`` for values of other types."""
    if isinstance(value, HeldQuery) and isinstance(value.scope, RemoteScope):
        return [value.scope.number, value.scope.number_of(value)]
    raise TypeError(f"a {type(value).__name__} has no form in msgpack")


@define(eq=False)
class Scopes:
    """The engine's scopes for the ``RemoteScope`` numbers of one connection, each opened when it is first used."""

    open_scope: Callable[[], QueryScope]
    _scopes: dict[int, QueryScope] = field(init=False, factory=dict)
    _queries: dict[tuple[int, int], HeldQuery] = field(init=False, factory=dict)

    def query(self, kind: type[Any], numbers: Any) -> HeldQuery:
        """Decode the numbers of a query. Raises ``NotImplementedError`` for a field of another type."""
        if kind is not HeldQuery:
            raise NotImplementedError(f"no field of params can be of type {kind}")
        scope, query = numbers
        if (scope, query) not in self._queries:
            if scope not in self._scopes:
                self._scopes[scope] = self.open_scope()
            self._queries[scope, query] = HeldQuery(self._scopes[scope])
        return self._queries[scope, query]

    def close(self, scope: int) -> None:
        """Close the scope of a number, if it is open."""
        if scope in self._scopes:
            self._scopes.pop(scope).close()
            self._queries = {known: query for known, query in self._queries.items() if known[0] != scope}

    def close_all(self) -> None:
        """Close all scopes."""
        for scope in list(self._scopes):
            self.close(scope)
