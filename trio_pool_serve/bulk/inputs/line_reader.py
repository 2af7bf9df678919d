"""The lines of a text file, of bounded length."""

from collections.abc import Iterator
from typing import BinaryIO

from trio_pool_serve.bulk.inputs import input_row

UTF8_MARK = b"\xef\xbb\xbf"


class LineReader(Iterator[bytes | None]):
    """Lines with their ends, without a byte order mark; None for one longer than ``MAX_ROW_BYTES``, which is skipped.

    ``number`` is that of the line that was read last, from 1.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._max_bytes = input_row.MAX_ROW_BYTES
        self.number = 0

    def __next__(self) -> bytes | None:
        line = self._file.readline(self._max_bytes + 1)
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) > self._max_bytes:
            self._skip_rest(line)
            return None
        return line.removeprefix(UTF8_MARK) if self.number == 1 else line

    def _skip_rest(self, line: bytes) -> None:
        while line and not line.endswith(b"\n"):
            line = self._file.readline(2**20)
