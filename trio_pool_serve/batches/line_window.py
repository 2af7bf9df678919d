"""Windows: the consecutive lines of a file that are computed together."""

from collections.abc import Iterator
from typing import BinaryIO

from attrs import frozen

from trio_pool_serve.batches.batch_line import BatchLine, RefusedLine, decode_line, too_long

WINDOW_LINES = 256

WINDOW_BYTES = 256 * 1024
"""From which on a window gets no more lines: some 60,000 tokens of English text."""

WINDOW_INPUTS = 8192
"""Strings and lists from which on a window gets no more lines: each may be an input, and each input has a response.
With vectors of 1024 numbers that is 100 MB of JSON."""

SKIPPED_BYTES = 2**20
"""Of a line that is too long, read at a time."""

BOM = b"\xef\xbb\xbf"


@frozen
class Window:
    """Some lines without the blank ones between them, and where the next window begins.

    Where a window ends depends on the bytes of the file only, so that a run which is resumed has the same windows.
    """

    lines: tuple[BatchLine | RefusedLine, ...]
    next_line: int
    next_offset: int


def read_window(file: BinaryIO, line: int, offset: int, max_line_bytes: int) -> Window | None:
    """Return the window that begins with a line at an offset; ``None`` at the end of the file. Blocks.

    Of longer lines than ``max_line_bytes`` nothing is kept.
    """
    lines: list[BatchLine | RefusedLine] = []
    next_line, next_offset, inputs = line, offset, 0
    for data, length in read_lines(file, offset, max_line_bytes):
        if data is None:
            lines.append(too_long(next_line, max_line_bytes))
        else:
            stripped = data.removeprefix(BOM) if next_offset == 0 else data
            if stripped and not stripped.isspace():
                lines.append(decode_line(next_line, stripped))
                inputs += stripped.count(b'"') // 2 + stripped.count(b"]")
        next_line, next_offset = next_line + 1, next_offset + length
        if next_line - line >= WINDOW_LINES or next_offset - offset >= WINDOW_BYTES or inputs >= WINDOW_INPUTS:
            break
    return None if next_offset == offset else Window(tuple(lines), next_line, next_offset)


def read_lines(file: BinaryIO, offset: int, max_line_bytes: int) -> Iterator[tuple[bytes | None, int]]:
    """Yield the lines from an offset, ``None`` for those that are too long, and how many bytes each has. Blocks."""
    file.seek(offset)
    while data := file.readline(max_line_bytes + 1):
        length = len(data)
        if length <= max_line_bytes:
            yield data, length
            continue
        is_whole = data.endswith(b"\n")
        while not is_whole and (skipped := file.readline(SKIPPED_BYTES)):
            length += len(skipped)
            is_whole = skipped.endswith(b"\n")
        yield None, length
