"""The page: a row for each aim, reached or not, and what each part has to say."""

from collections.abc import Sequence
from typing import Any

import attrs

from benchmarks.gpu.part import PartReport, Row, Subject
from benchmarks.gpu.published import PUBLISHED
from benchmarks.gpu.selected_gpu import SelectedGpu, description
from benchmarks.report import markdown_table, settings_document, write_document

TRIAL = "**A trial on a CPU: it shows that the benchmark works, and no number means anything.**"

COLUMNS = ("row", "part", "bar", "value", "result", "note")


def write_page(reports: Sequence[PartReport], subject: Subject, machine: dict[str, Any]) -> bool:
    """Write the page and its JSON; return whether they were written.

    If nothing is measured yet, the page of an earlier run stays.
    """
    rows = [(report.part.name, row) for report in reports for row in report.rows]
    if all(row.value is None for _, row in rows):
        return False
    settings = subject.settings
    texts = [
        *([TRIAL] if settings.on_cpu else []),
        computed_on(subject.gpu),
        f"**The GPU path**\n\n{markdown_table(COLUMNS, [cells(*one) for one in rows])}",
        PUBLISHED,
        *map(_section, reports),
    ]
    document = {
        "machine": machine,
        "gpu": description(subject.gpu),
        "settings": settings_document(settings),
        "parts": [_document(report) for report in reports],
    }
    write_document(settings.folder, "gpu", document, texts)
    return True


def computed_on(gpu: SelectedGpu | None) -> str:
    """Return a line about the GPU."""
    if gpu is None:
        return "There is no GPU."
    return (
        f"{gpu.name}, {gpu.memory_gib:g} GiB, {gpu.multiprocessors} multiprocessors, compute capability "
        f"{gpu.capability}; CUDA {gpu.cuda}, driver {gpu.driver or 'unknown'}."
    )


def cells(part: str, row: Row) -> list[str]:
    """Return the cells of a part's row, by ``COLUMNS``."""
    value = "–" if row.value is None else number(row.value)
    return [row.aim.row, part, row.aim.limit, value, row.verdict, row.note.replace("|", "\\|").replace("\n", " ")]


def number(value: float) -> str:
    """Return a value with as many digits as mean something."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.5g}"


def _section(report: PartReport) -> str:
    if not report.was_run:
        return f"### {report.part.name}\n\nNot run: {report.failure}."
    lines = [f"### {report.part.name}", f"{report.took_s:.0f} s."]
    if report.failure:
        lines.append(f"**It failed:**\n\n```\n{report.failure}\n```")
    return "\n\n".join([*lines, *report.findings.texts])


def _document(report: PartReport) -> dict[str, Any]:
    return {
        "part": report.part.name,
        "was_run": report.was_run,
        "took_s": report.took_s,
        "failure": report.failure,
        "rows": [{**attrs.asdict(row), "verdict": row.verdict} for row in report.rows],
        **report.findings.details,
    }
