"""Reads encoded images from ``data:`` and ``file:`` URLs.

Blocking: runs in ``media`` threads.
"""

import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pybase64

from trio_pool_serve.errors import InvalidRequestError, MediaError, require, require_request
from trio_pool_serve.rendering.memory_budget import in_units

BASE64_SLICE = 2**20
"""Characters of base64 decoded per call, a multiple of four; the interpreter lock is released between calls."""

BEFORE_DATA = re.compile(r"; *base64\s*,$", re.IGNORECASE | re.ASCII)

WHITESPACE = b"\t\n\f\r "

STANDARD_ALPHABET = bytes.maketrans(b"-_", b"+/")

MAX_MEDIA_TYPE = 256
"""Characters before the comma of a ``data:`` URL."""


def read_data_url(url: str, max_bytes: int) -> bytes:
    """Return the image in a ``data:`` URL, ignoring its media type: the format is detected from the bytes.

    As in browsers, base64 may have ASCII whitespace, percent-encoding, and no padding (the WHATWG's Infra standard,
    "forgiving-base64 decode"). It may also be in the URL-safe alphabet.

    Raises ``InvalidRequestError`` for a URL without base64, ``MediaError`` for invalid base64 or too many bytes.
    """
    start = url.find(",", 0, MAX_MEDIA_TYPE) + 1
    require_request(
        BEFORE_DATA.search(url[:start]) is not None, "The data: URL of the image must have ;base64 before its comma."
    )
    excess = len(url) - start - (max_bytes + 2) // 3 * 4
    if excess > 0 and excess > sum(url.count(chr(blank)) for blank in WHITESPACE) + 3 * url.count("%"):
        raise too_large(max_bytes)  # whatever is left out
    try:
        with suppress(ValueError):
            return _of_limited_size(_decoded(url, start), max_bytes)
        return _of_limited_size(_decoded(_strict(url[start:])), max_bytes)
    except ValueError as error:
        raise MediaError("The image is not valid base64.") from error


def _decoded(encoded: str, start: int = 0) -> bytes:
    """Return the bytes of strict base64. Raises ``ValueError``."""
    if encoded.find("=", start, -2) >= 0:
        raise ValueError("There is padding before the end.")
    slices = (encoded[at : at + BASE64_SLICE] for at in range(start, len(encoded), BASE64_SLICE))
    return b"".join([pybase64.b64decode(each, validate=True) for each in slices])


def _strict(forgiving: str) -> str:
    """Return base64 without percent-encoding and whitespace, in the standard alphabet, and with padding."""
    unescaped = re.sub("%([0-9A-Fa-f]{2})", lambda found: chr(int(found[1], 16)), forgiving)
    encoded = unescaped.encode("ascii", "replace").translate(STANDARD_ALPHABET, WHITESPACE).decode()
    if len(encoded) % 4 == 0:
        encoded = encoded.removesuffix("=").removesuffix("=")
    return encoded.replace("=", "?") + "=" * (-len(encoded) % 4)  # padding elsewhere is as wrong as a ?


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
    with suppress(ValueError):
        split = urlsplit(url)
        path = unquote(split.path)
        if split.netloc in ("", "localhost") and path.startswith("/") and "\0" not in path:
            return path
    raise InvalidRequestError("The URL of the image must be file:/// and an absolute path.")


def _read(path: str, root: str, max_bytes: int) -> bytes:
    _require_plain(Path(path).stat())  # opening a device can have side effects
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | os.O_NOFOLLOW)
    with open(opened, "rb", buffering=0) as file:  # noqa: PTH123  (a descriptor, not a path)
        # A parent folder can have been replaced by a link since the path was resolved.
        _require_inside(str(Path(f"/proc/self/fd/{opened}").readlink()), root)
        status = os.fstat(opened)
        _require_plain(status)
        if status.st_size > max_bytes:  # without reading as much as is accepted
            raise too_large(max_bytes)
        return _of_limited_size(file.read(max_bytes + 1), max_bytes)


def _require_plain(status: os.stat_result) -> None:
    require(stat.S_ISREG(status.st_mode), "The file of the image is not a regular file.", MediaError)


def _require_inside(path: str, root: str) -> None:
    require_request(
        path != root and Path(path).is_relative_to(root),
        "The file of the image is outside the permitted folder (--allowed-media-path).",
    )


def _of_limited_size(content: bytes, max_bytes: int) -> bytes:
    if len(content) > max_bytes:
        raise too_large(max_bytes)
    return content


def too_large(max_bytes: int) -> MediaError:
    """Return the error for an image of too many bytes."""
    return MediaError(f"The image is larger than {in_units(max_bytes)}.")
