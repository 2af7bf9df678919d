"""A part of the benchmark: with a time budget of its own, and failing alone."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import trio
from attrs import Factory, define, field, frozen

from benchmarks.aim import Aim
from benchmarks.gpu.selected_gpu import SelectedGpu
from benchmarks.gpu.settings import Settings
from benchmarks.job_process import text_of

Verdict: TypeAlias = Literal["reached", "not reached", "measured", "not measured"]
"""measured: there is no bar."""


@frozen(kw_only=True)
class Subject:
    """What the parts measure: the models' folders, and the GPU, of which there is none in a trial on CPU.

    ``note_step`` is told what a part does at the moment.
    """

    settings: Settings
    bert: Path
    splade: Path
    gpu: SelectedGpu | None = None
    note_step: Callable[[str], None] = lambda _: None


@frozen(kw_only=True)
class Row:
    """A line of the page: what was aimed at, the value found, and what has to be known about it."""

    aim: Aim
    value: float | None = None
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        """What the value says."""
        if self.value is None:
            return "not measured"
        reached = self.aim.is_reached(self.value)
        return "measured" if reached is None else "reached" if reached else "not reached"


@define
class Findings:
    """What a part has found so far: it may fail at any time.

    ``texts`` are paragraphs in Markdown for the page; ``details`` are for its JSON.
    """

    values: dict[Aim, tuple[float | None, str]] = field(factory=dict)
    texts: list[str] = field(factory=list)
    details: dict[str, Any] = field(factory=dict)

    def measured(self, aim: Aim, value: float, note: str = "") -> None:
        """Record a row's value."""
        self.values[aim] = value, note

    def not_measured(self, aim: Aim, reason: str) -> None:
        """Record why a row has no value."""
        self.values[aim] = None, reason


@frozen(kw_only=True)
class Part:
    """A step of the benchmark, for ``budget_s`` seconds at most, or longer on CPU.

    Each of its ``aims`` becomes a row, whatever happens.
    """

    name: str
    budget_s: float
    run: Callable[[Subject, Findings], Awaitable[None]]
    aims: Sequence[Aim] = ()

    async def report(self, subject: Subject) -> "PartReport":
        """Run it; whatever it raises becomes its failure. Cancellation: as the part's own, which ends its processes."""
        findings, failure = Findings(), ""
        began = trio.current_time()
        budget_s = self.budget_s * subject.settings.time_factor
        try:
            with trio.move_on_after(budget_s) as scope:
                await self.run(subject, findings)
            if scope.cancelled_caught:
                failure = f"it did not end within {budget_s:g} s"
        except Exception as error:
            failure = text_of(error)
        return PartReport(part=self, findings=findings, failure=failure, took_s=trio.current_time() - began)


@frozen(kw_only=True)
class PartReport:
    """What came of a part; of one that was not run, ``failure`` says why."""

    part: Part
    findings: Findings = Factory(Findings)
    failure: str = ""
    took_s: float = 0.0
    was_run: bool = True

    @property
    def reason(self) -> str:
        """The failure in one line: its first, with the last one if that is announced."""
        first, *others = self.failure.splitlines() or [""]
        return f"{first} {others[-1]}" if others and first.endswith(":") else first

    @property
    def rows(self) -> list[Row]:
        """A row for each aim."""
        found = ((aim, *self.findings.values.get(aim, (None, self.reason))) for aim in self.part.aims)
        return [Row(aim=aim, value=value, note=note) for aim, value, note in found]
