"""How the suite is spread over processes: file by file, and the files whose tests share servers together.

It says nothing to a run in one process, nor to one with another ``--dist``.
"""

import re

import pytest
from xdist.scheduler import LoadFileScheduling

SHARING = re.compile(r"test_clients_\w+\.py$")
"""Files of client libraries, all of which ask the servers that their folder's fixtures start."""


class FilesTogether(LoadFileScheduling):
    """Gives each process a file at a time, and those that share servers to one process."""

    def _split_scope(self, nodeid: str) -> str:
        return SHARING.sub("test_clients", super()._split_scope(nodeid))


LONGEST = re.compile(
    r"^tests/(ray/|server|end_to_end|benchmarks|runner|models/test_(openvino|cpu|conversion)|"
    r"test_(docs|installing|packaging))"
)
"""Files that take longest, and wait for processes: they come first, so that no process ends with one of them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.match(item.nodeid) is None)


@pytest.hookimpl(optionalhook=True)  # unknown with ``-p no:xdist``
def pytest_xdist_make_scheduler(config: pytest.Config, log) -> FilesTogether | None:
    return FilesTogether(config, log) if config.getvalue("dist") == "loadfile" else None


LOST = pytest.StashKey[str]()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error: object) -> None:
    if error:
        node.config.stash[LOST] = f"{node.gateway.id}, a process that ran tests, was lost: {error}"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if LOST in session.config.stash:
        # Not the status of tests that have failed: those may run again.
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if LOST in config.stash:
        terminalreporter.write_line(f"{config.stash[LOST]}. Tests that were left have not been run.", red=True)
