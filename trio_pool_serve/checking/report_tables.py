"""The report of ``trio-pool-serve check`` on a terminal."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trio_pool_serve.checking.model_report import ModelReport

MIB = 2**20

SHOWN_LABELS = 10


def print_report(report: ModelReport, console: Console) -> None:
    """Print what was found out about a model that can be served."""
    console.print(Text(f"{report.id} can be served.", style="green"), soft_wrap=True)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    for name, value in _facts(report):
        facts.add_row(name, Text(value))  # as Text: what files declare may look like markup
    console.print(facts)
    if report.speed:
        console.print(_speed_table(report))
    for warning in report.warnings:
        console.print(Text(warning, style="yellow"))


def _facts(report: ModelReport) -> Iterator[tuple[str, str]]:
    yield "kind", f"{report.kind}: {', '.join(report.architectures) or report.model_type}"
    yield "tasks", ", ".join(f"{task} (default)" if task == report.task else task for task in report.tasks)
    yield "accepts", ", ".join(report.accepts)
    if report.scoring is not None:
        yield "scoring", report.scoring + (f", {report.similarity}" if report.similarity else "")
    if report.pooling != "none":
        yield "pooling", f"{report.pooling} ({report.pooling_from})"
    if report.dimensions:
        yield "normalised", f"{'yes' if report.normalize else 'no'} ({report.normalize_from})"
        yield "dimensions", str(report.dimensions)
    if report.labels:
        more = len(report.labels) - SHOWN_LABELS
        yield "labels", ", ".join(report.labels[:SHOWN_LABELS]) + (f" and {more} more" if more > 0 else "")
    yield "longest input", f"{report.max_model_len} tokens"
    for name, prompt in report.prompts.items():
        yield "prompt", f"{name}{' (default)' if name == report.default_prompt_name else ''}: {prompt!r}"
    yield "computed", f"{report.dtype} on {report.device}, {report.computation}"
    if report.cosine_with_float32 is not None:
        yield "agreement", f"cosine with float32: {report.cosine_with_float32:.4f}"
    yield "engine", f"{report.engine}, {report.replicas} at a time, batches of {report.max_batch_tokens} tokens"
    yield "loaded in", f"{report.load_s:.1f} s"
    memory = report.memory
    yield "weights", f"{memory.weights / MIB:.0f} MiB, {report.parameters / 1e6:.1f} M parameters"
    loaded = f"{memory.resident_after_load / MIB:.0f} MiB once loaded (before: {memory.resident_before / MIB:.0f})"
    if memory.peak_of_largest_batch is not None:
        loaded += f", {memory.peak_of_largest_batch / MIB:.0f} MiB with the largest batches"
    yield "resident", loaded


def _speed_table(report: ModelReport) -> Table:
    table = Table("tokens a row", "rows/s", "tokens/s", "ms for one row alone")
    for column in table.columns:
        column.justify = "right"
    for speed in report.speed:
        table.add_row(
            str(speed.tokens), f"{speed.rows_per_s:.1f}", f"{speed.tokens_per_s:.0f}", f"{speed.ms_alone:.1f}"
        )
    return table
