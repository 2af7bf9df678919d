"""The steps of a server's start, as a line at the bottom of a terminal.

The code that loads models reports its steps. Without a display, as in a process without a terminal, that does nothing.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")

QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_VERBOSITY": "error", "TRANSFORMERS_VERBOSITY": "error"}
"""Variables with which libraries print no progress bars and no warnings, in child processes either."""

_phase = ""
_show: Callable[[str], object] | None = None
_end: Callable[[], object] | None = None
"""Removes the line; ``None`` unless the line is on the terminal of this process."""


def report_phase(phase: str) -> None:
    """Show a phase, such as the loading of one model."""
    global _phase
    _phase = phase
    report_step("")


def report_step(step: str) -> None:
    """Show a step of the current phase."""
    if _show is not None:
        _show(": ".join(filter(None, (_phase, step))))


def report_items(items: Sequence[Item], step: str) -> Iterator[Item]:
    """Yield ``items``, and show the number of the current one as a step."""
    for number, item in enumerate(items, 1):
        report_step(f"{step}, {number} of {len(items)}")
        yield item


def download_bar(step: str) -> type[Any] | None:
    """Return the class of a bar for huggingface_hub that reports bytes of a step; ``None`` if nothing shows them."""
    if _show is None:
        return None
    from tqdm import tqdm  # type: ignore[import-untyped]  # imported here: only a download needs it

    class Reported(tqdm):  # type: ignore[misc]
        def display(self, *_: object, **__: object) -> bool:
            if self.unit == "B" and self.total:
                report_step(f"{step}, {self.format_sizeof(self.n)}B of {self.format_sizeof(self.total)}B")
            return True

        def close(self) -> None:
            """Print no line break either."""

    return Reported


def show_steps_with(show: Callable[[str], object], end: Callable[[], object] | None = None) -> None:
    """Call ``show`` with each phase and step of this process from now on; ``end`` removes a line of this process."""
    global _show, _end
    silence_libraries()
    _show, _end = show, end or _end


def silence_libraries() -> None:
    """Let libraries print nothing in the midst of lines of this process, unless the user has asked for it."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


def shows_steps() -> bool:
    """Return whether steps are shown, by this process or its parent."""
    return _show is not None


def is_displayed() -> bool:
    """Return whether the line is on the terminal of this process."""
    return _end is not None


def end_display() -> None:
    """Remove the line. Does nothing if there is none, so any code that prints may call it."""
    global _show, _end
    end, _show, _end = _end, None, None
    if end is not None:
        end()
