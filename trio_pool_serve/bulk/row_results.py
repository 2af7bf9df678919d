"""The results of rows, and what computes them a window at a time."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeAlias

import msgspec
from attrs import frozen

from trio_pool_serve.bulk.inputs.input_row import InputRow
from trio_pool_serve.bulk.outputs.column_types import OutputColumn


class RowResult(msgspec.Struct, frozen=True):
    """The values of the output's columns for a row, after the id; or the error that it failed with."""

    values: tuple[Any, ...] = ()
    error: str = ""


@frozen(eq=False)
class WindowResult:
    """The results of a window's rows, in their order, and the tokens that were computed."""

    rows: list[RowResult]
    tokens: int

    @classmethod
    def joined(cls, parts: Sequence["WindowResult"]) -> "WindowResult":
        """Return the results of consecutive parts as one."""
        return cls([row for part in parts for row in part.rows], sum(part.tokens for part in parts))


class Computer(Protocol):
    """Computes rows: with a model in this process, or by a server."""

    columns: Sequence[OutputColumn]
    """Those of ``RowResult.values``."""
    model: dict[str, str]
    """What the numbers depend on, by name."""

    async def compute(self, rows: Sequence[InputRow]) -> WindowResult:
        """Compute a window. With a model of this process, the same rows give the same bytes.

        Raises ``PoolServeError`` if the run cannot go on. Cancellation: at once.
        """


OpenComputer: TypeAlias = Callable[[], AbstractAsyncContextManager[Computer]]
