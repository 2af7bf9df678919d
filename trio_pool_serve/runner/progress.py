"""What takes long at start, shown to whoever waits at a terminal."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

Item = TypeVar("Item")


def shown(items: Sequence[Item], what: str) -> Iterator[Item]:
    """Yield items, with a bar on standard error that is gone in the end; without one where that is no terminal."""
    console = Console(stderr=True)
    yield from track(items, what, console=console, transient=True, disable=not console.is_terminal)
