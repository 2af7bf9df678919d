"""The handle on a batch whose rows are on the host already."""

from collections.abc import Generator
from typing import Any

from attrs import frozen

from trio_pool_serve.types import PooledValue


@frozen(eq=False)
class CopiedBatch:
    """Rows that are on the host when ``launch`` returns: awaiting them does not wait."""

    rows: list[tuple[PooledValue, ...]]

    def __await__(self) -> Generator[Any, Any, list[tuple[PooledValue, ...]]]:
        return self.rows
        yield  # makes this a generator, as ``await`` requires
