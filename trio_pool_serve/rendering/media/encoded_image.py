"""Reads encoded images from ``data:`` and ``file:`` URLs.

Blocking: runs in ``media`` threads.
"""

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pybase64

from trio_pool_serve.errors import InvalidRequestError, MediaError
from trio_pool_serve.rendering.memory_budget import in_units

BASE64_SLICE = 2**20
"""Characters of base64 decoded per call, a multiple of four; the interpreter lock is released between calls."""

MAX_MEDIA_TYPE = 256
"""Characters before the comma of a ``data:`` URL."""


def read_data_url(url: str, max_bytes: int) -> bytes:
    """Return the image in a ``data:`` URL, ignoring its media type: the format is detected from the bytes.

    Raises ``InvalidRequestError`` for a URL without base64, ``MediaError`` for invalid base64 or too many bytes.
    """
    comma = url.find(",", 0, MAX_MEDIA_TYPE)
    if comma < 0 or not url[:comma].lower().endswith(";base64"):
        raise InvalidRequestError("The data: URL of the image must have ;base64 before its comma.")
    start = comma + 1
    if len(url) - start > (max_bytes + 2) // 3 * 4:
        raise too_large(max_bytes)
    try:
        decoded = [
            pybase64.b64decode(url[at : at + BASE64_SLICE], validate=True)
            for at in range(start, len(url), BASE64_SLICE)
        ]
    except ValueError as error:
        raise MediaError("The image is not valid base64.") from error
    if any(len(part) < BASE64_SLICE // 4 * 3 for part in decoded[:-1]):
        raise MediaError("The image is not valid base64.")  # padding before the end
    return _of_limited_size(b"".join(decoded), max_bytes)


def read_file_url(url: str, allowed: Path | None, max_bytes: int) -> bytes:
    """Return the image of a ``file:`` URL.

    Raises ``InvalidRequestError`` unless the path, with symbolic links resolved, is under ``allowed``, whether or not
    it exists; ``MediaError`` if it is not a plain file, cannot be read, or is too large.
    """
    if allowed is None:
        raise InvalidRequestError("This server reads no images from files (--allowed-media-path).")
    real, root = os.path.realpath(_path_of(url)), os.path.realpath(allowed)
    _require_inside(real, root)
    try:
        return _read(real, root, max_bytes)
    except OSError as error:
        raise MediaError("The file of the image cannot be read.") from error


def _path_of(url: str) -> str:
    try:
        split = urlsplit(url)
        path = unquote(split.path)
        if split.netloc in ("", "localhost") and path.startswith("/") and "\0" not in path:
            return path
    except ValueError:
        pass
    raise InvalidRequestError("The URL of the image must be file:/// and an absolute path.")


def _read(path: str, root: str, max_bytes: int) -> bytes:
    _require_plain(Path(path).stat())  # opening a device can have side effects
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | os.O_NOFOLLOW)
    with open(opened, "rb", buffering=0) as file:  # noqa: PTH123  (a descriptor, not a path)
        # A parent folder can have been replaced by a link since the path was resolved.
        _require_inside(str(Path(f"/proc/self/fd/{opened}").readlink()), root)
        status = os.fstat(opened)
        _require_plain(status)
        if status.st_size > max_bytes:
            raise too_large(max_bytes)
        return _of_limited_size(file.read(max_bytes + 1), max_bytes)


def _require_plain(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise MediaError("The file of the image is not a regular file.")


def _require_inside(path: str, root: str) -> None:
    if path == root or not Path(path).is_relative_to(root):
        raise InvalidRequestError("The file of the image is outside the permitted folder (--allowed-media-path).")


def _of_limited_size(content: bytes, max_bytes: int) -> bytes:
    if len(content) > max_bytes:
        raise too_large(max_bytes)
    return content


def too_large(max_bytes: int) -> MediaError:
    """Return the error for an image of too many bytes."""
    return MediaError(f"The image is larger than {in_units(max_bytes)}.")
