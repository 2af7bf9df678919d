"""What a run costs: CPU seconds and started Python processes.

``--costs NAME``, which ``scripts/test`` passes, prints both by directory at the end of a run, and fails one that starts
more than ``ALLOWED`` times the processes that ``tests/costs.json`` has for that name. With ``--write-costs`` the
processes of a whole run that passes are written.

CPU seconds are those of the processes that run tests, and of their child processes. The children of a server that is
killed would be missing: ``charge`` adds theirs. No CPU seconds are written: shared machines of one kind needed 1,336
and 2,756 for the same tests.
"""

import json
import os
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from attrs import frozen

FOLDER = Path(__file__).parent / "process_starts"

ALLOWED = 1.5
SPARE = 3
"""Processes that a directory may start beyond what is written in any case: runs need more or fewer workers."""

GROWN = 10
"""The exit status of a run that costs too much."""

NO_TEST = "imports and collection"

tests: Counter[str] = Counter()
wall_s: Counter[str] = Counter()
cpu_s: Counter[str] = Counter()
"""By file; in the process that reports, sums over all processes that run tests."""

_charged_s = [0.0]
NOTES = pytest.StashKey[Path]()
REPORT: "pytest.StashKey[Report]" = pytest.StashKey()


def charge(processes: list[psutil.Process]) -> None:
    """Count the CPU seconds of processes that are about to be killed; the system would not add them to a parent's."""
    for process in processes:
        with suppress(psutil.Error):  # it has ended
            _charged_s[0] += sum(process.cpu_times()[:2])


def machine() -> str:
    """Return the kind of this machine."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    known = {name.strip(): value.strip() for name, _, value in lines}  # of the last core
    parts = [known.get("model name", platform.machine()), *(known.get(each, "") for each in ("cpu family", "model"))]
    return f"{' '.join(parts)}, {os.cpu_count()} cores, Python {'.'.join(platform.python_version_tuple()[:2])}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="NAME", help="print what the run costs, and compare it with tests/costs.json")
    parser.addoption("--write-costs", action="store_true", help="with --costs: write tests/costs.json instead")


def pytest_configure(config: pytest.Config) -> None:
    part = config.args_source == pytest.Config.ArgsSource.ARGS or config.option.keyword
    if config.getoption("--write-costs") and part and not hasattr(config, "workerinput"):
        raise pytest.UsageError("--write-costs: only what all tests of a lane cost is written, not that of a part")
    if config.getoption("--costs") and not hasattr(config, "workerinput"):
        descriptor, name = tempfile.mkstemp(prefix="process-starts-")
        os.close(descriptor)
        config.stash[NOTES] = Path(name)
        os.environ["TESTS_NOTE_STARTS_IN"] = name
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))


def _cpu_s() -> float:
    return sum(os.times()[:4]) + _charged_s[0]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> object:
    file = item.nodeid.partition("::")[0]
    started, before = time.monotonic(), _cpu_s()
    try:
        return (yield)
    finally:
        tests[file] += 1
        wall_s[file] += time.monotonic() - started
        cpu_s[file] += _cpu_s() - before


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    for ours, theirs in zip((tests, wall_s, cpu_s), getattr(node, "workeroutput", {}).get("costs", ()), strict=False):
        ours.update(theirs)


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if not config.getoption("--costs"):
        return
    if hasattr(config, "workeroutput"):
        cpu_s[NO_TEST] = _cpu_s() - cpu_s.total()
        config.workeroutput["costs"] = [dict(each) for each in (tests, wall_s, cpu_s)]
        return
    cpu_s[NO_TEST] += sum(os.times()[:2]) if NO_TEST in cpu_s else _cpu_s() - cpu_s.total()
    starts = Counter(config.stash[NOTES].read_text().splitlines())
    config.stash[NOTES].unlink()
    name, path = config.getoption("--costs"), config.rootpath / "tests" / "costs.json"
    written = json.loads(path.read_text()) if path.exists() else {}
    if config.getoption("--write-costs") and session.exitstatus == 0:
        written[name] = dict(starts)
        path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    report = Report(starts, Counter(written.get(name, {})))
    config.stash[REPORT] = report
    if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and report.excesses():
        session.exitstatus = GROWN


def directory_of(file: str) -> str:
    """Return ``tests`` or a folder of it; other names are returned unchanged."""
    return "/".join(Path(file).parts[:-1][:2]) or file


def by_directory(files: Mapping[str, float]) -> Counter[str]:
    found: Counter[str] = Counter()
    for file, number in files.items():
        found[directory_of(file)] += number
    return found


@frozen
class Report:
    """Processes that a run has started, and that are written for it, by file."""

    starts: Counter[str]
    budget: Counter[str]

    def excesses(self) -> list[str]:
        """Return a line for each directory that starts too many processes."""
        found = []
        allowed = by_directory(self.budget)
        for directory, started in sorted(by_directory(self.starts).items()):
            if started > max(ALLOWED * allowed[directory], allowed[directory] + SPARE):
                grown = {
                    file: f"{file} ({number} in place of {self.budget[file]})"
                    for file, number in self.starts.items()
                    if directory_of(file) == directory and number > self.budget[file]
                }
                found.append(
                    f"{directory} starts {started} processes; {allowed[directory]} are written in "
                    f"tests/costs.json: {', '.join(grown.values())}"
                )
        return found

    def table(self) -> list[str]:
        columns = [by_directory(each) for each in (tests, wall_s, cpu_s)]
        columns += [by_directory(self.starts), by_directory(self.budget)]
        rows = {name: [column[name] for column in columns] for name, _ in columns[2].most_common()}
        rows["all"] = [column.total() for column in columns]
        head = "".join(f"{title:>11}" for title in ("tests", "s", "CPU s", "processes", "written"))
        return [f"{'directory':22}{head}"] + [
            f"{name:22}{''.join(f'{number:11.0f}' for number in row)}" for name, row in rows.items()
        ]


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    report = config.stash.get(REPORT, None)
    if report is None:
        return
    terminalreporter.section(f"costs of {config.getoption('--costs')}, on {machine()}")
    for line in report.table():
        terminalreporter.write_line(line)
    slowest = ", ".join(f"{file.removeprefix('tests/')} {seconds:.0f}" for file, seconds in wall_s.most_common(10))
    terminalreporter.write_line(f"longest, s: {slowest}")
    for line in report.excesses():
        terminalreporter.write_line(line, red=True)
