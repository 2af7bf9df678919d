"""The page: a row for each aim, reached or not, and what each part has to say."""

from collections.abc import Sequence
from typing import Any

import attrs

from benchmarks.gpu.part import PartReport, Row, Subject
from benchmarks.gpu.selected_gpu import SelectedGpu, description
from benchmarks.report import add_markdown, print_table, settings_document, write_json

TRIAL = "**A trial on a CPU: it shows that the benchmark works, and no number means anything.**"


def write_page(reports: Sequence[PartReport], subject: Subject, machine: dict[str, Any]) -> None:
    """Write the page and its JSON, and print the rows."""
    settings = subject.settings
    if settings.on_cpu:
        add_markdown(TRIAL)
    add_markdown(computed_on(subject.gpu))
    rows = [(report.part.name, row) for report in reports for row in report.rows]
    print_table("The GPU path", ["row", "part", "bar", "value", "result", "note"], [_cells(*one) for one in rows])
    for report in reports:
        add_markdown(_section(report))
    document = {
        "machine": machine,
        "gpu": description(subject.gpu),
        "settings": settings_document(settings),
        "parts": [_document(report) for report in reports],
    }
    write_json(settings.folder, "gpu", document)


def computed_on(gpu: SelectedGpu | None) -> str:
    """Return a line about the GPU."""
    if gpu is None:
        return "There is no GPU."
    return (
        f"{gpu.name}, {gpu.memory_gib:g} GiB, {gpu.multiprocessors} multiprocessors, compute capability "
        f"{gpu.capability}; CUDA {gpu.cuda}, driver {gpu.driver or 'unknown'}."
    )


def _cells(part: str, row: Row) -> list[str]:
    value = "–" if row.value is None else number(row.value)
    return [row.aim.row, part, row.aim.limit, value, row.verdict, row.note.replace("|", "\\|").replace("\n", " ")]


def number(value: float) -> str:
    """Return a value with as many digits as mean something."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.5g}"


def _section(report: PartReport) -> str:
    lines = [f"### {report.part.name}", f"{report.took_s:.0f} s."]
    if report.failure:
        lines.append(f"**It failed:**\n\n```\n{report.failure}\n```")
    return "\n\n".join([*lines, *report.findings.texts])


def _document(report: PartReport) -> dict[str, Any]:
    return {
        "part": report.part.name,
        "took_s": report.took_s,
        "failure": report.failure,
        "rows": [{**attrs.asdict(row), "verdict": row.verdict} for row in report.rows],
        **report.findings.details,
    }
