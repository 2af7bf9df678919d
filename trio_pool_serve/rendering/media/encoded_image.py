"""Encoded images and their digests; reads them from ``data:`` and ``file:`` URLs.

Blocking: runs in ``media`` threads.
"""

import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pybase64
from attrs import frozen

from trio_pool_serve.errors import InvalidRequestError, MediaError

BASE64_SLICE = 2**20
"""Characters of base64 decoded per call, a multiple of four; the interpreter lock is released between calls."""

MAX_MEDIA_TYPE = 256
"""Characters before the comma of a ``data:`` URL."""


@frozen(eq=False)
class EncodedImage:
    """An image's bytes as sent or stored; ``digest`` is their SHA-256."""

    content: bytes
    digest: bytes


def image_of_chunks(chunks: Iterable[bytes]) -> EncodedImage:
    """Return the image of several chunks of bytes."""
    content = b"".join(chunks)
    return EncodedImage(content, hashlib.sha256(content).digest())


def read_data_url(url: str, max_bytes: int) -> EncodedImage:
    """Return the image in a ``data:`` URL, ignoring its media type: the format is detected from the bytes.

    Raises ``InvalidRequestError`` for a URL without base64, ``MediaError`` for invalid base64 or too many bytes.
    """
    comma = url.find(",", 0, MAX_MEDIA_TYPE)
    if comma < 0 or not url[:comma].lower().endswith(";base64"):
        raise InvalidRequestError("The data: URL of an image must say ;base64 before its comma.")
    start = comma + 1
    if len(url) - start > (max_bytes + 2) // 3 * 4:
        raise too_large(max_bytes)
    try:
        decoded = [
            pybase64.b64decode(url[at : at + BASE64_SLICE], validate=True)
            for at in range(start, len(url), BASE64_SLICE)
        ]
    except ValueError as error:
        raise MediaError("The base64 of an image is broken.") from error
    if any(len(part) < BASE64_SLICE // 4 * 3 for part in decoded[:-1]):
        raise MediaError("The base64 of an image is broken.")  # padding before the end
    image = image_of_chunks(decoded)
    if len(image.content) > max_bytes:
        raise too_large(max_bytes)
    return image


def read_file_url(url: str, allowed: Path | None, max_bytes: int) -> EncodedImage:
    """Return the image of a ``file:`` URL.

    Raises ``InvalidRequestError`` unless the path, with symbolic links resolved, is under ``allowed``, whether or not
    it exists; ``MediaError`` if it is not a plain file, cannot be read, or is too large.
    """
    if allowed is None:
        raise InvalidRequestError("Images are read from files only with --allowed-media-path.")
    path = _path_of(url)
    real, root = os.path.realpath(path), os.path.realpath(allowed)
    if not _is_inside(real, root):
        raise _outside()
    try:
        return image_of_chunks([_read(real, root, max_bytes)])
    except OSError as error:
        raise MediaError("The file of an image cannot be read.") from error


def _path_of(url: str) -> str:
    try:
        split = urlsplit(url)
        path = unquote(split.path)
        if split.netloc in ("", "localhost") and path.startswith("/") and "\0" not in path:
            return path
    except ValueError:
        pass
    raise InvalidRequestError("The file: URL of an image must be file:/// and an absolute path.")


def _read(path: str, root: str, max_bytes: int) -> bytes:
    _require_plain(Path(path).stat())  # opening a device can have side effects
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | os.O_NOFOLLOW)
    with open(opened, "rb", buffering=0) as file:  # noqa: PTH123  (a descriptor, not a path)
        # A parent folder can have been replaced by a link since the path was resolved.
        if not _is_inside(str(Path(f"/proc/self/fd/{opened}").readlink()), root):
            raise _outside()
        status = os.fstat(opened)
        _require_plain(status)
        if status.st_size > max_bytes:
            raise too_large(max_bytes)
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise too_large(max_bytes)
    return content


def _require_plain(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise MediaError("The file of an image is not a plain file.")


def _is_inside(path: str, root: str) -> bool:
    return Path(path).is_relative_to(root) and path != root


def _outside() -> InvalidRequestError:
    return InvalidRequestError("The file of an image is not under --allowed-media-path.")


def too_large(max_bytes: int) -> MediaError:
    """Return the error for an image of too many bytes."""
    return MediaError(f"An image is larger than {max_bytes} bytes.")
