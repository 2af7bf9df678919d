"""The layout of ``--help``: names on the left, meanings on the right, and no word broken."""

import io
import textwrap
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel

LEFT = 26
"""Columns for names. The meaning of a longer one begins on the next line."""

MOST_COLUMNS = 120
"""Longer lines are hard to read."""


class TwoColumns:
    """Lays out one panel of cyclopts' help."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: "HelpPanel") -> None:  # noqa: ARG002
        """Print a heading with its entries."""
        if not panel.entries:
            return
        lines = [f"{panel.title}:"]
        for entry in panel.entries:
            lines += _lines(_label(entry, panel.format), _meaning(entry), min(console.width, MOST_COLUMNS))
        console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)

    def render_usage(self, console: Console, _: Any, usage: Any) -> None:
        """Print the usage of the command."""
        console.print(f"Usage: {_plain(usage)}\n", highlight=False, markup=False)

    def render_description(self, console: Console, _: Any, description: Any) -> None:
        """Print the description of the command."""
        if description:
            console.print(description)


def _plain(renderable: Any) -> str:
    plain = Console(file=io.StringIO(), width=100_000, color_system=None)
    with plain.capture() as captured:
        plain.print(renderable or "", highlight=False, end="")
    return captured.get().strip()


def _label(entry: "HelpEntry", panel: str) -> str:
    if panel == "command":
        return ", ".join(entry.display_labels)
    if entry.positional_label:
        return entry.positional_label
    negated = {name.replace("--no-", "--", 1) for name in entry.negative_names}
    names = [name.replace("--", "--[no-]", 1) if name in negated else name for name in entry.positive_names]
    label = ", ".join([*entry.positive_shorts, *names])
    return f"{label} {entry.metavar}" if entry.metavar and not entry.choices else label


def _meaning(entry: "HelpEntry") -> str:
    about = [_plain(entry.description)]
    if entry.choices:
        about.append(f"[{', '.join(entry.choices)}]")
    if entry.default not in (None, "False", "None", "none", '""'):
        about.append(f"[default: {entry.default}]")
    return " ".join(about)


def _lines(label: str, meaning: str, width: int) -> list[str]:
    indent = " " * (LEFT + 2)
    wrapped = textwrap.wrap(
        meaning, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    if len(label) + 2 > LEFT or not wrapped:
        return [f"  {label}", *wrapped]
    return [f"  {label:{LEFT}}" + wrapped[0][LEFT + 2 :], *wrapped[1:]]
