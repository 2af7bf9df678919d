"""The tests that need a GPU."""

import re
import subprocess
import sys
from collections import Counter

import trio

from benchmarks.aim import Aim
from benchmarks.gpu.part import Findings, Subject
from benchmarks.servers import ROOT

FAILED = Aim(row="tests marked cuda: failed", at_most=0)

MARK = re.compile(r"pytest\.mark\.cuda\b")

VERDICT = re.compile(r"^(\S*::.*\S) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b")
"""Of pytest -v. A test that fails in its fixture has an ERROR."""

SELECTED = "cuda and not slow"
"""The slow one compiles a model, which takes longer than this part may."""

COMPLETE = (0, 1, 5)
"""pytest's exit statuses if all tests were run: they passed, some failed, there are none."""


def test_files() -> list[str]:
    """Return the files with such tests: to import all others would take longer."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if MARK.search(path.read_text())]


class TestsFailedError(Exception):
    """pytest has ended without running the tests; carries the end of what it wrote."""

    __test__ = False


async def run(subject: Subject, findings: Findings) -> None:
    """Run the tests. Those that ended in time are counted, even if others did not.

    Cancellation: pytest is terminated, and killed after five seconds.
    """
    ended: dict[str, str] = {}
    written: list[str] = []
    status = None
    try:
        status = await _run_pytest(subject, ended, written)
    finally:
        _report(findings, ended, were_all=status in COMPLETE)
    if status not in COMPLETE:
        raise TestsFailedError("\n".join([f"pytest ended with status {status}", *written[-12:]]))


async def _run_pytest(subject: Subject, ended: dict[str, str], written: list[str]) -> int:
    command = [sys.executable, "-u", "-m", "pytest", "-v", "-m", SELECTED, "--color=no", "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT / "pyproject.toml")]
    async with trio.open_nursery() as nursery:

        async def run_it(*, task_status: trio.TaskStatus[trio.Process]) -> None:
            await trio.run_process(
                [*command, *test_files()],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
                task_status=task_status,
            )

        process = await nursery.start(run_it)
        assert process.stdout is not None
        rest = b""
        async for part in process.stdout:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                _note(line.decode(errors="replace"), ended, written, subject)
    assert process.returncode is not None
    return process.returncode


def _note(line: str, ended: dict[str, str], written: list[str], subject: Subject) -> None:
    written.append(line)
    if found := VERDICT.match(line):
        ended[found[1]] = found[2]
        subject.note_step(f"{len(ended)} tests")


def _report(findings: Findings, ended: dict[str, str], *, were_all: bool) -> None:
    counts = Counter(ended.values())
    failed = sorted(name for name, verdict in ended.items() if verdict in ("FAILED", "ERROR"))
    passed, skipped = counts["PASSED"], counts["SKIPPED"]
    counted = f"{passed} passed, {len(failed)} failed, {skipped} skipped (`{SELECTED}`)"
    if failed or (passed and were_all):
        findings.measured(FAILED, len(failed), counted)
    else:
        findings.not_measured(FAILED, counted if were_all else f"not all tests were run: {counted}")
    findings.details |= {"passed": passed, "failed": failed, "skipped": skipped}
    if failed:
        findings.texts.append("\n".join(["Failed:", "", *(f"- `{name}`" for name in failed)]))
