"""A terminal on standard error: its console, the log lines on it, and the steps of a start in its last line.

Imported only where there is a terminal.
"""

import logging

from rich.console import Console
from rich.control import Control
from rich.logging import RichHandler
from rich.segment import ControlType

from trio_pool_serve.telemetry.start_display import (
    end_display,
    is_displayed,
    report_phase,
    report_step,
    show_steps_with,
    shows_steps,
)


class TerminalConsole(Console):
    """Standard error, whose cursor is never hidden: a process that is killed could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:  # noqa: FBT001, FBT002  (rich's signature)
        """Leave the cursor as it is."""
        return show


CONSOLE = TerminalConsole(stderr=True)

CLEAR_LINE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))
"""The line may be the display of the parent, which is written again."""


def begin_display(phase: str) -> None:
    """Show a line on the terminal until ``end_display``: a spinner, the phase, the time so far."""
    # Imported here: only the first process shows the line.
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = (SpinnerColumn(), text, TimeElapsedColumn())
    line = Progress(*columns, console=CONSOLE, transient=True, redirect_stdout=False, redirect_stderr=False)
    task = line.add_task("")
    show_steps_with(lambda step: line.update(task, description=step), line.stop)
    report_phase(phase)
    line.start()


class TerminalHandler(RichHandler):
    """Writes log lines. While steps of a start are shown, lines of level INFO are steps, except for debugging."""

    def __init__(self) -> None:
        super().__init__(console=CONSOLE, show_path=False)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        if shows_steps() and record.levelno == logging.INFO and not logging.getLogger().isEnabledFor(logging.DEBUG):
            report_step(record.getMessage())
            return
        if not is_displayed():
            self.console.control(CLEAR_LINE)
        super().emit(record)

    def close(self) -> None:
        """Remove the display: the process ends."""
        end_display()
        super().close()
