"""Decodes images to pixels, at a cost that is bounded by an image's bytes before they are decoded.

A thread that decodes cannot be stopped, and in some formats a few bytes cause a pass over all pixels, or a megabyte to
be inflated, and can be repeated. Blocking: runs in ``media`` threads.
"""

import re
import struct
from io import BytesIO

from PIL import ExifTags, Image, UnidentifiedImageError
from PIL.ImageFile import ImageFile

from trio_pool_serve.errors import MediaError, require

MAX_SCANS_AT_MAX_PIXELS = 32
"""Maximum scans of a JPEG with the maximum number of pixels; a smaller one may have proportionally more.

Each scan is a pass over all pixels, 35 ms for 50 million, and can be as short as 87 bytes: runs of empty blocks. The
standard sets no limit, so libjpeg-turbo considers such files valid and advises programs to set a limit (its
``-maxscans`` and ``TJPARAM_SCANLIMIT``; its fuzzers stop at 500). libjpeg's script for progressive files, which most
programs use, has 10 scans in colour and 18 in CMYK.
"""

MAX_JPEG_SEGMENTS = 10_000
"""Pillow reads them one by one, some microseconds each. 20 megabytes of metadata take 320 of the largest."""

MAX_JPEG_FILLER = 65_536
"""Bytes between the segments before a JPEG's first scan: Pillow reads them one by one. Normal files have none."""

MAX_PNG_CHUNKS = 50_000
"""Read one by one, as the segments of JPEG. libpng writes chunks of 8 KiB: 20 megabytes are 2,500."""

MAX_INFLATED_CHUNKS = 100
"""Compressed chunks of a PNG other than pixels: a colour profile, texts.

Pillow inflates each to a megabyte at most, 4 ms for a kilobyte of the file, but limits only texts that it keeps.
"""

MAX_MCU_SIDE = 32
"""Pixels per side of the largest minimum coded unit (MCU) of JPEG: 4 × 4 blocks of 8 × 8 pixels."""

# The JPEG markers with a length. Of the others, FF 00 is a pixel's FF, D0-D7 occur among pixels, and unknown ones are
# decoding errors. libjpeg continues its search at a marker, so bytes that may contain a marker must not be skipped.
_SEGMENT = re.compile(rb"\xff[\xc0-\xc7\xc9-\xcf\xd9-\xef\xfe]")
_END, _SCAN = 0xD9, 0xDA
_ARITHMETIC = frozenset({0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF})

_SEARCHED = 2**18
"""Bytes searched per call, 3 ms at worst: other threads can run between calls."""

_INFLATED = frozenset({b"iCCP", b"zTXt", b"iTXt"})


def count_scans(encoded: bytes) -> int:
    """Return the number of passes over the pixels of an image: the scans of a JPEG, else 1.

    Raises ``MediaError`` for a file with more segments or chunks than normal files have, and for a JPEG in arithmetic
    coding, which no browser supports and which takes many times as long to decode.
    """
    if encoded.startswith(b"\xff\xd8\xff"):
        return _jpeg_scans(encoded)
    if encoded.startswith(b"\x89PNG\r\n\x1a\n"):
        _require_few_chunks(encoded)
    return 1


def _jpeg_scans(encoded: bytes) -> int:
    scans = filler = 0
    end = 2
    for _ in range(MAX_JPEG_SEGMENTS):
        at = _segment_from(encoded, end)
        if not scans:
            filler += (at if at >= 0 else len(encoded)) - end
        require(
            filler <= MAX_JPEG_FILLER,
            "The image is a JPEG with filler between its segments, which is not supported.",
            MediaError,
        )
        if at < 0 or encoded[at + 1] == _END:
            return scans  # bytes after the end belong to other files: a thumbnail, a video
        scans += encoded[at + 1] == _SCAN
        require(
            encoded[at + 1] not in _ARITHMETIC,
            "The image is a JPEG in arithmetic coding, which is not supported.",
            MediaError,
        )
        end = at + 2 + max(2, int.from_bytes(encoded[at + 2 : at + 4]))
    raise MediaError(f"The image is a JPEG of more than {MAX_JPEG_SEGMENTS} segments.")


def _segment_from(encoded: bytes, at: int) -> int:
    while at < len(encoded):
        found = _SEGMENT.search(encoded, at, at + _SEARCHED + 1)  # one byte more: a marker has two
        if found is not None:
            return found.start()
        at += _SEARCHED
    return -1


def _require_few_chunks(encoded: bytes) -> None:
    at, inflated = 8, 0
    for _ in range(MAX_PNG_CHUNKS):
        if len(encoded) - at < 8:
            return
        length, kind = struct.unpack_from(">I4s", encoded, at)
        if kind == b"IEND":
            return
        inflated += kind in _INFLATED
        if inflated > MAX_INFLATED_CHUNKS:
            raise MediaError(f"The image is a PNG with more than {MAX_INFLATED_CHUNKS} compressed texts or profiles.")
        at += 12 + length
    raise MediaError(f"The image is a PNG of more than {MAX_PNG_CHUNKS} chunks.")


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""The formats of browsers. Pillow reads dozens of others, each with a separate parser."""

EXIF_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The transposition that turns an image upright, by its EXIF orientation."""

MAX_PIXELS = 50_000_000
"""Maximum pixels of an image. Cameras of phones take up to 50 megapixels; decoding them takes up to 800 MB."""

Image.MAX_IMAGE_PIXELS = None  # ``MAX_PIXELS`` is checked instead, before any pixel is decoded


def decode_image(encoded: bytes, max_pixels: int) -> Image.Image:
    """Return a decoded image, upright, in RGB, as transformers' ``load_image``; of several frames the first.

    Raises ``MediaError`` for invalid or truncated images, for more pixels than the limit by the header, and for images
    that would take longer to decode than their pixels account for.
    """
    scans = count_scans(encoded)
    try:
        with Image.open(BytesIO(encoded), formats=FORMATS) as image:
            _require_bounded(image, scans, max_pixels)
            return _upright_rgb(image)
    except MediaError:
        raise
    except UnidentifiedImageError as error:
        raise MediaError(f"The image is not in a supported format: {', '.join(FORMATS)}.") from error
    except Exception as error:  # parsers raise various errors for invalid bytes
        raise MediaError("The image is broken: it cannot be decoded.") from error


def _require_bounded(image: ImageFile, scans: int, max_pixels: int) -> None:
    width, height = image.size
    require(
        1 <= width * height <= max_pixels,
        f"The image has {width} × {height} pixels; the limit is {max_pixels}.",
        MediaError,
    )
    units = -(-width // MAX_MCU_SIDE) * -(-height // MAX_MCU_SIDE)
    # More work than ``MAX_SCANS_AT_MAX_PIXELS`` scans of the largest image.
    require(
        scans <= MAX_SCANS_AT_MAX_PIXELS or scans * units * MAX_MCU_SIDE**2 <= MAX_SCANS_AT_MAX_PIXELS * max_pixels,
        f"The image of {width} × {height} pixels has {scans} scans, too many to decode.",
        MediaError,
    )
    # Pillow's decoder for these is in Python: 7 s for an image of a kilobyte, holding the interpreter lock.
    require(
        all(tile.codec_name != "bmp_rle" for tile in image.tile),
        "The image is a BMP in run-length encoding, which is not supported.",
        MediaError,
    )


def _upright_rgb(image: Image.Image) -> Image.Image:
    image.load()  # metadata can come after the pixels
    image.info.pop("transparency", None)  # the conversion drops it anyway, and Pillow warns about some forms of it
    # ImageOps.exif_transpose would rewrite all EXIF data, which is not used: 10 s for 20 MB, in 1.3 GB.
    transposition = EXIF_TRANSPOSITIONS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    rgb = image.convert("RGB")
    return rgb if transposition is None else rgb.transpose(transposition)
