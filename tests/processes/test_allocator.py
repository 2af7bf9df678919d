import mmap
import sys
from pathlib import Path

import pytest

from trio_pool_serve.processes.allocator import return_mapped_pages

pytestmark = [pytest.mark.unit, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

SIZE = 4 * 2**20


def resident_bytes(file: Path) -> int:
    """Return how much of the process's memory is pages of ``file``."""
    rows = iter(Path("/proc/self/smaps").read_text().splitlines())
    of_file = [next(row for row in rows if row.startswith("Rss:")) for row in rows if row.endswith(str(file))]
    return sum(int(row.split()[1]) * 1024 for row in of_file)


def test_pages_of_a_mapped_file_are_returned_and_read_the_same_again(tmp_path: Path) -> None:
    file = tmp_path / "model of weights.bin"
    content = bytes(range(256)) * (SIZE // 256)
    file.write_bytes(content)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:] == content
        assert resident_bytes(file) == SIZE
        return_mapped_pages(file)
        assert resident_bytes(file) == 0
        assert mapped[:] == content


def test_a_private_page_that_was_written_to_stays(tmp_path: Path) -> None:
    file = tmp_path / "written"
    file.write_bytes(b"a" * SIZE)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        mapped[:1] = b"b"
        return_mapped_pages(file)
        assert mapped[:2] == b"ba"
