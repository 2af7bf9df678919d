"""A progress bar for long steps of the start."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

Item = TypeVar("Item")


def with_progress_bar(items: Sequence[Item], what: str) -> Iterator[Item]:
    """Yield ``items`` with a transient progress bar on standard error; without one if that is not a terminal."""
    console = Console(stderr=True)
    yield from track(items, what, console=console, transient=True, disable=not console.is_terminal)
