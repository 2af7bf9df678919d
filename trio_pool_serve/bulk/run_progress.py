"""The progress of a run: a bar on a terminal, otherwise a line now and then."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attrs import define, field
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from trio_pool_serve.runs.run import Position

LINE_EVERY_S = 10.0


@define(eq=False)
class RunProgress:
    """Shows rows and tokens, their rates, the time left and failures, on standard error.

    ``total`` is the number of rows if it is known; ``before`` is the position of an earlier run.
    """

    title: str
    total: int | None
    before: Position
    console: Console
    bar: Progress
    """It has one task, and is shown only on a terminal."""
    _began: float = field(init=False, factory=time.monotonic)
    _last_line: float = field(init=False, factory=time.monotonic)

    def show(self, now: Position) -> None:
        """Show how many rows have been written."""
        if self.console.is_terminal:
            self.bar.update(self.bar.task_ids[0], completed=now.done, counts=self.counts(now))
        elif time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            self.note(f"{self.title}: {self.counts(now)}{self._left(now)}")

    def note(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, markup=False)

    def counts(self, now: Position) -> str:
        """Return rows and tokens with their rates, and the failures; the rates are this run's own."""
        seconds = max(1e-3, time.monotonic() - self._began)
        of_total = "" if self.total is None else f" of {self.total:,}"
        rows_per_s = (now.done - self.before.done) / seconds
        tokens_per_s = (now.tokens - self.before.tokens) / seconds
        earlier = f" ({self.before.done:,} by an earlier run)" if self.before.done else ""
        return (
            f"{now.done:,}{of_total} rows{earlier}, {now.tokens:,} tokens, "
            f"{rows_per_s:,.0f} rows/s, {tokens_per_s:,.0f} tokens/s, {now.failed:,} failed"
        )

    def _left(self, now: Position) -> str:
        done = now.done - self.before.done
        if self.total is None or not done:
            return ""
        left_s = (self.total - now.done) * (time.monotonic() - self._began) / done
        return f", {left_s / 60:.0f} min left" if left_s >= 90 else f", {left_s:.0f} s left"


@contextmanager
def showing(title: str, total: int | None, before: Position, console: Console) -> Iterator[RunProgress]:
    """Yield the progress of a run, whose bar is shown until the block ends."""
    counts = TextColumn("{task.fields[counts]}")
    columns = (TextColumn("[bold]{task.description}"), BarColumn(), counts, TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        bar.add_task(title, total=total, completed=before.done, counts="")
        yield RunProgress(title, total, before, console, bar)


@contextmanager
def scanning(console: Console, n_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows how much of a large input has been read, if the console is a terminal."""
    columns = (TextColumn("reading the input"), BarColumn(), TimeRemainingColumn())
    is_shown = console.is_terminal and (n_bytes or 0) >= 2**28
    with Progress(*columns, console=console, disable=not is_shown) as bar:
        task = bar.add_task("", total=n_bytes)
        yield lambda done: bar.update(task, completed=done)
