"""Files of requests, one per line: the content of a line, and the windows of a file."""

from collections.abc import Generator, Iterator
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import msgspec
from attrs import frozen

from trio_pool_serve.runs.run import Position, Window
from trio_pool_serve.storage.durable_files import storage_errors

MAX_CUSTOM_ID = 512
"""The limit of a ``custom_id``, in characters."""

WINDOW_LINES = 256

WINDOW_BYTES = 256 * 1024
"""A window ends with the line with which it reaches this size: some 60,000 tokens of English text."""

WINDOW_VECTORS = 8192
"""A window ends with the line with which its responses may have this many vectors: 100 MB of JSON with 1024 numbers
each. Each string and each list may be an input. Only the lines count, so a resumed run has the same windows."""

TOKEN_VECTOR_ROUTES = frozenset({"pooling", "embed_all", "invocations", ""})
"""Last parts of the paths whose responses may have a vector for each token."""

BYTES_PER_TOKEN = 4
"""The bytes of a token of English text."""

IMAGE_VECTORS = 1024
"""Vectors of an image that a line names by its URL: as many as with ColPali."""

SKIPPED_BYTES = 2**20
"""Bytes of a line that is too long, of which each read skips this many."""

BOM = b"\xef\xbb\xbf"


class BatchError(msgspec.Struct, frozen=True):
    """An error of a batch or of one of its lines: OpenAI's code, the field at fault, and the line, counted from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@frozen
class Line:
    """A line: the path its request is for, and the JSON body; or the ``error`` in it. ``number`` counts from 0."""

    number: int
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    error: BatchError | None = None

    @property
    def model(self) -> str | None:
        """The model that the body names; ``None`` if it names none, or not by a string."""
        try:
            return msgspec.json.decode(self.body, type=_Body).model or None
        except msgspec.DecodeError:
            return None


class _Body(msgspec.Struct):
    model: str | None = None


class _Fields(msgspec.Struct):
    custom_id: str | None = None
    method: str | None = None
    url: str | None = None
    body: msgspec.Raw = msgspec.Raw()


def decode_line(number: int, data: bytes) -> Line:
    """Return a line, with an error if it is not a request."""
    try:
        data.decode()  # all of it: msgspec does not look into the body
        fields = msgspec.json.decode(data, type=_Fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Line(
            number,
            None,
            error=BatchError("invalid_json_line", f"The line is not a JSON object with a request: {error}."),
        )
    custom_id = fields.custom_id if fields.custom_id and len(fields.custom_id) <= MAX_CUSTOM_ID else None
    return Line(number, custom_id, fields.url or "", bytes(fields.body), _error_in(fields))


def _error_in(fields: _Fields) -> BatchError | None:
    for name in ("custom_id", "method", "url"):
        if not getattr(fields, name):
            return BatchError("missing_required_parameter", f"Missing required parameter: '{name}'.", name)
    if len(fields.custom_id or "") > MAX_CUSTOM_ID:
        return BatchError(
            "invalid_custom_id",
            f"custom_id has {len(fields.custom_id or '')} characters; the limit is {MAX_CUSTOM_ID}.",
            "custom_id",
        )
    if fields.method != "POST":
        return BatchError("invalid_method", f"The method is {(fields.method or '')[:20]!r}; it must be POST.", "method")
    body = bytes(fields.body).lstrip()
    if not body:
        return BatchError("missing_required_parameter", "Missing required parameter: 'body'.", "body")
    if not body.startswith(b"{"):
        return BatchError("invalid_json_line", "The body must be a JSON object.", "body")
    return None


def request_id_of(digest: str, number: int) -> str:
    """Return the id of a line's request: the same whenever a file with this SHA-256 is run."""
    return sha256(f"{digest}:{number}".encode()).hexdigest()[:32]


def line_windows(path: Path, max_line_bytes: int, position: Position) -> Generator[Window[Line], None, None]:
    """Yield the windows of a file from a position on. Blocks. Raises ``StorageError``."""
    with storage_errors(path), path.open("rb") as file:
        line, offset = position.line, position.offset
        while (window := read_window(file, line, offset, max_line_bytes)) is not None:
            yield window
            line, offset = window.next_line, window.next_offset


def read_window(file: BinaryIO, line: int, offset: int, max_line_bytes: int) -> Window[Line] | None:
    """Return the window that begins with a line at an offset, without blank lines; ``None`` at the end of the file.

    Nothing is kept of a line longer than ``max_line_bytes``. Blocks.
    """
    lines: list[Line] = []
    next_line, next_offset, vectors = line, offset, 0
    file.seek(offset)
    for data, length in read_lines(file, max_line_bytes, has_mark=offset == 0):
        if data is None:
            message = f"The line exceeds {max_line_bytes} bytes (--max-body-bytes)."
            lines.append(Line(next_line, None, error=BatchError("line_too_long", message)))
        elif data and not data.isspace():
            lines.append(decode_line(next_line, data))
            vectors += data.count(b'"') // 2 + data.count(b"]")
            if lines[-1].url.rstrip("/").rpartition("/")[2] in TOKEN_VECTOR_ROUTES:
                vectors += len(data) // BYTES_PER_TOKEN + data.count(b"://") * IMAGE_VECTORS
        next_line, next_offset = next_line + 1, next_offset + length
        if next_line - line >= WINDOW_LINES or next_offset - offset >= WINDOW_BYTES or vectors >= WINDOW_VECTORS:
            break
    return None if next_offset == offset else Window(tuple(lines), next_line, next_offset)


def read_lines(file: BinaryIO, max_line_bytes: int, *, has_mark: bool = True) -> Iterator[tuple[bytes | None, int]]:
    """Yield each line with its line end, ``None`` for one that is too long, and its length in bytes. Blocks.

    A byte order mark is left out of the first line if ``has_mark``.
    """
    while data := file.readline(max_line_bytes + 1):
        length = len(data)
        if length <= max_line_bytes:
            yield data.removeprefix(BOM) if has_mark else data, length
        else:
            while not data.endswith(b"\n") and (data := file.readline(SKIPPED_BYTES)):
                length += len(data)
            yield None, length
        has_mark = False
