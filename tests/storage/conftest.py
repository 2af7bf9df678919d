"""A fixture of the tests of files that are known by their content."""

import pytest

from trio_pool_serve.storage import file_digests


@pytest.fixture
def read_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were read for their digests."""
    read: list[str] = []
    read_file = file_digests.read_file
    monkeypatch.setattr(file_digests, "read_file", lambda path: read.append(path.name) or read_file(path))
    return read
