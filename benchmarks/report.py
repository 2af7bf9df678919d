"""Results for machines and for people, and the command by which a script makes them."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_type_hints

import attrs
import matplotlib as mpl
import trio
from attrs import Factory, frozen
from cyclopts import Parameter
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.machine import describe_machine

RESULTS = Path(__file__).parent / "results"

console = Console()

_tables: list[str] = []
"""Tables in Markdown that were printed and are not written yet."""

BUSY = 0.3
"""Load average past which something else runs. Compute threads that spin lose most by it, and not all
servers spin: comparisons are then wrong, and not just noisy."""


Names: TypeAlias = Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())]
Numbers: TypeAlias = Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative=())]
Flags: TypeAlias = Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=(), allow_leading_hyphen=True)]


def command_of(run: Callable[..., Any]) -> Callable[..., None]:
    """Return the command of a script: it runs ``run`` in trio with the settings of its annotation."""
    kind = get_type_hints(run)["settings"]

    def main(settings: Any = kind()) -> None:  # noqa: B008  (frozen)
        trio.run(run, settings)

    main.__annotations__["settings"] = kind
    main.__doc__ = (sys.modules[run.__module__].__doc__ or "").partition("\n")[0]
    return main


def warn_if_busy(machine: dict[str, Any]) -> None:
    """Print a warning if the machine is too busy for a result; ``machine`` is from ``describe_machine``."""
    load = machine["load_average_before"]
    if load > BUSY:
        console.print(f"the load average is {load:.2f}: these numbers will mean little", style="yellow")


def settings_document(settings: Any) -> dict[str, Any]:
    """Return a script's settings for JSON, without the folder of its results."""
    return attrs.asdict(settings, filter=lambda attribute, _: attribute.name != "output_dir")


@frozen
class Report:
    """The results of a script. It is made before measuring, because it describes the machine, and warns if it is busy.

    ``name`` is that of the files; ``settings`` has their folder, ``output_dir``.
    """

    name: str
    settings: Any
    machine: dict[str, Any] = Factory(describe_machine)

    def __attrs_post_init__(self) -> None:
        warn_if_busy(self.machine)

    def write(self, settings: dict[str, Any] | None = None, **results: Any) -> None:
        """Write the results with the machine and the settings, and the tables that were printed.

        ``settings`` override the benchmark's own of the same names.
        """
        settings = settings_document(self.settings) | (settings or {})
        document = {"machine": self.machine, "settings": settings, **results}
        write_json(self.settings.output_dir, self.name, document)

    def write_figure(self, figure: Figure) -> None:
        """Write a plot beside the results."""
        write_figure(figure, self.settings.output_dir, self.name)


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


def add_markdown(text: str) -> None:
    """Add a text to the document that ``write_json`` writes."""
    _tables.append(text.strip())


def write_json(folder: Path, name: str, document: dict[str, Any]) -> None:
    """Write ``document`` to ``folder/name.json``, and the tables printed before to ``folder/name.md``."""
    write_document(folder, name, document, _tables)
    _tables.clear()
    console.print(f"written: {name}.json, {name}.md", highlight=False)


def write_document(folder: Path, name: str, document: dict[str, Any], texts: Sequence[str]) -> None:
    """Write ``document`` to ``folder/name.json`` and ``texts`` to ``folder/name.md``, each as a whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {
        f"{name}.json": json.dumps(document, indent=2, default=str),
        f"{name}.md": "\n\n".join([*texts, _provenance(document)]),
    }
    for file, text in written.items():
        temporary = folder / f".{file}"
        temporary.write_text(f"{text}\n")
        temporary.replace(folder / file)


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
    markdown = markdown_table(columns, rows)
    print(markdown)
    _tables.append(f"**{title}**\n\n{markdown}")


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, its first column aligned to the left and the others to the right."""
    lines = [columns, ["---", *("---:" for _ in columns[1:])], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


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
