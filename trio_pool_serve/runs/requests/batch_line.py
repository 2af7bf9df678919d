"""The lines of a file of requests, and windows: those that are computed together."""

from collections.abc import Iterator
from hashlib import sha256
from typing import BinaryIO

import msgspec
from attrs import frozen

MAX_CUSTOM_ID = 512
"""Characters."""

PREFIX = "batch_req_"


class LineError(msgspec.Struct, frozen=True):
    """Why a line has no response: OpenAI's code for it, and the field at fault."""

    code: str
    message: str
    param: str | None = None


@frozen
class BatchLine:
    """The request of a line: the path that it is for, and its JSON body. ``number`` counts a file's lines from 0."""

    number: int
    custom_id: str
    url: str
    body: bytes

    @property
    def model(self) -> str | None:
        """The model that the body names; ``None`` if it names none, or not by a string."""
        try:
            return msgspec.json.decode(self.body, type=_Body).model or None
        except msgspec.DecodeError:
            return None


@frozen
class RefusedLine:
    """A line that is no request."""

    number: int
    custom_id: str | None
    error: LineError


class _Body(msgspec.Struct):
    model: str | None = None


class _Line(msgspec.Struct):
    custom_id: str | None = None
    method: str | None = None
    url: str | None = None
    body: msgspec.Raw = msgspec.Raw()


def decode_line(number: int, data: bytes) -> BatchLine | RefusedLine:
    """Return the request of a line, or why it is none."""
    try:
        data.decode()  # all of it: msgspec does not look into the body
        line = msgspec.json.decode(data, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return RefusedLine(number, None, LineError("invalid_json_line", f"The line is not understood: {error}."))
    found = _error_in(line)
    custom_id = line.custom_id if line.custom_id and len(line.custom_id) <= MAX_CUSTOM_ID else None
    if found is not None:
        return RefusedLine(number, custom_id, found)
    return BatchLine(number, line.custom_id or "", line.url or "", bytes(line.body))


def _error_in(line: _Line) -> LineError | None:
    for name in ("custom_id", "method", "url"):
        if not getattr(line, name):
            return LineError("missing_required_parameter", f"Missing required parameter: '{name}'.", name)
    if len(line.custom_id or "") > MAX_CUSTOM_ID:
        return LineError("invalid_custom_id", f"custom_id may have {MAX_CUSTOM_ID} characters.", "custom_id")
    if line.method != "POST":
        return LineError("invalid_method", "The method of a line must be POST.", "method")
    body = bytes(line.body).lstrip()
    if not body:
        return LineError("missing_required_parameter", "Missing required parameter: 'body'.", "body")
    if not body.startswith(b"{"):
        return LineError("invalid_json_line", "The body of a line must be a JSON object.", "body")
    return None


def request_id_of(digest: str, number: int) -> str:
    """Return the id of a line's request: the same whenever a file with this SHA-256 is run."""
    return sha256(f"{digest}:{number}".encode()).hexdigest()[:32]


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
    file.seek(offset)
    for data, length in read_lines(file, max_line_bytes, has_mark=offset == 0):
        if data is None:
            error = LineError("line_too_long", f"A line may have {max_line_bytes} bytes, and this has more.")
            lines.append(RefusedLine(next_line, None, error))
        elif data and not data.isspace():
            lines.append(decode_line(next_line, data))
            inputs += data.count(b'"') // 2 + data.count(b"]")
        next_line, next_offset = next_line + 1, next_offset + length
        if next_line - line >= WINDOW_LINES or next_offset - offset >= WINDOW_BYTES or inputs >= WINDOW_INPUTS:
            break
    return None if next_offset == offset else Window(tuple(lines), next_line, next_offset)


def read_lines(file: BinaryIO, max_line_bytes: int, *, has_mark: bool = True) -> Iterator[tuple[bytes | None, int]]:
    """Yield the lines with their ends, ``None`` for those that are too long, and how many bytes each has. Blocks.

    A byte order mark is left out of the first line if that may have one.
    """
    while data := file.readline(max_line_bytes + 1):
        length = len(data)
        if length <= max_line_bytes:
            yield data.removeprefix(BOM) if has_mark else data, length
            has_mark = False
            continue
        is_whole = data.endswith(b"\n")
        while not is_whole and (skipped := file.readline(SKIPPED_BYTES)):
            length += len(skipped)
            is_whole = skipped.endswith(b"\n")
        has_mark = False
        yield None, length
