"""Results for machines and for people."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

RESULTS = Path(__file__).parent / "results"

console = Console()

_tables: list[str] = []
"""Tables in Markdown, printed and not written yet: a benchmark is a process, and shows what it writes."""

BUSY = 0.3
"""Load average past which something else runs. Compute threads that spin lose most by it, and not all
servers spin: comparisons are then wrong, and not just noisy."""


def warn_if_busy(machine: dict[str, Any]) -> None:
    """Print a warning if the machine is too busy for a result; ``machine`` is from ``describe_machine``."""
    load = machine["load_average_before"]
    if load > BUSY:
        console.print(f"the load average is {load:.2f}: these numbers will mean little", style="yellow")


def open_progress() -> Progress:
    """Return a progress bar for steps that have names."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


@contextmanager
def open_steps(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show progress; the value is called with a step's name when it begins."""
    with open_progress() as progress:
        task = progress.add_task(title, total=total)
        done = iter(range(total))
        yield lambda name: progress.update(task, description=f"{title}: {name}", completed=next(done))
        progress.update(task, description=title, completed=total)


def settings_document(settings: Any) -> dict[str, Any]:
    """Return a script's settings for JSON, but where its results go."""
    return attrs.asdict(settings, filter=lambda attribute, _: attribute.name != "output_dir")


def add_markdown(text: str) -> None:
    """Have a text written by ``write_json`` as the tables are."""
    _tables.append(text.strip())


def write_json(folder: Path, name: str, document: dict[str, Any]) -> None:
    """Write ``document`` to ``folder/name.json``, and the tables printed before to ``folder/name.md``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    (folder / f"{name}.md").write_text("\n\n".join([*_tables, _provenance(document)]) + "\n")
    _tables.clear()
    console.print(f"written: {name}.json, {name}.md", highlight=False)


def _provenance(document: dict[str, Any]) -> str:
    """Return a line about when, where and how something was measured."""
    machine = document.get("machine", {})
    where = f"{machine.get('processor')}, {machine.get('cores')} cores"
    settings = ", ".join(f"{name} {value}" for name, value in document.get("settings", {}).items())
    return f"Measured {machine.get('measured')} at {machine.get('commit')} on {where}; {settings or 'no settings'}."


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table twice: for the terminal, and in Markdown, which ``write_json`` writes as well."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    lines = [columns, ["---", *("---:" for _ in columns[1:])], *rows]
    markdown = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    print(markdown)
    _tables.append(f"**{title}**\n\n{markdown}")


def open_figure(panels: int) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with ``panels`` plots side by side."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, panels, figsize=(6 * panels, 4.5), squeeze=False, layout="constrained")
    for axis in axes[0]:
        axis.grid(visible=True, which="major", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def write_figure(figure: Figure, folder: Path, name: str) -> None:
    """Write ``figure`` to ``folder/name.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=130)
    console.print(f"written: {name}.png", highlight=False)
