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


STARTING_SERVERS = re.compile(r"^tests/(server|end_to_end|test_docs|test_packaging)")
"""Files that take longest, and wait for processes: they come first, so that no process ends with one of them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: STARTING_SERVERS.match(item.nodeid) is None)


@pytest.hookimpl(optionalhook=True)  # unknown with ``-p no:xdist``
def pytest_xdist_make_scheduler(config: pytest.Config, log) -> FilesTogether | None:
    return FilesTogether(config, log) if config.getvalue("dist") == "loadfile" else None
