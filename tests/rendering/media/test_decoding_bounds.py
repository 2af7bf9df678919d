"""What a decoder is not given, since it would keep a thread for longer than the pixels account for."""

import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from tests.rendering.media.images import chunk, empty_scan, jpeg, mean_scan, png, run_length_bmp, segment, zeros
from trio_pool_serve.errors import MediaError
from trio_pool_serve.rendering.media.decoding import decode_image
from trio_pool_serve.rendering.media.decoding_bounds import (
    MAX_INFLATED_CHUNKS,
    MAX_JPEG_SEGMENTS,
    MAX_PNG_CHUNKS,
    MAX_SCANS_AT_MAX_PIXELS,
    count_scans,
)

pytestmark = pytest.mark.unit

SIDE = 1000
SCANS = MAX_SCANS_AT_MAX_PIXELS
FIRST, LATER = mean_scan(SIDE, SIDE), empty_scan(SIDE, SIDE)
PIXEL = chunk(b"IDAT", zlib.compress(b"\0\0"))


def decoded(content: bytes) -> Image.Image:
    return decode_image(content, SIDE * SIDE)


def noise(mode: str, width: int, height: int) -> Image.Image:
    channels = {"L": (), "RGB": (3,), "CMYK": (4,)}[mode]
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, *channels), dtype=np.uint8), mode)


def progressive(mode: str, width: int = SIDE, height: int = SIDE, **options) -> bytes:
    written = BytesIO()
    noise(mode, width, height).save(written, "JPEG", progressive=True, **options)
    return written.getvalue()


# -- JPEG -------------------------------------------------------------------------------------------------


def test_a_jpeg_whose_scans_change_nothing_is_refused():
    """Of an image of as many pixels as are allowed, every ten bytes would cost a pass over all of them."""
    assert len(LATER) < 20
    with pytest.raises(MediaError, match=f"1000 × 1000 pixels has {SCANS + 1} scans"):
        decoded(jpeg(SIDE, SIDE, FIRST, *[LATER] * SCANS))
    assert decoded(jpeg(SIDE, SIDE, FIRST, *[LATER] * (SCANS - 1))).size == (SIDE, SIDE)


def test_scans_without_anything_in_them_count():
    with pytest.raises(MediaError, match=f"{SCANS + 1} scans"):
        decoded(jpeg(SIDE, SIDE, *[FIRST[:10]] * (SCANS + 1)))


@pytest.mark.parametrize(
    "between", [b"\xff" * 5, b"\0\x11\x22", b"\xff\0", b"\xff\xd3", segment(0xFE, b""), b"\xff\xe0\0\0"]
)
def test_scans_are_found_whatever_stands_between_them(between):
    """All of it is passed over by the decoder, which reads on as if it were not there."""
    few = jpeg(SIDE, SIDE, FIRST, *[between + LATER] * 4)
    assert decoded(few).size == (SIDE, SIDE)
    assert count_scans(few) == 5
    with pytest.raises(MediaError, match="scans"):
        decoded(jpeg(SIDE, SIDE, FIRST, *[between + LATER] * SCANS))


def test_a_smaller_jpeg_may_have_more_scans_in_proportion():
    side = SIDE // 4
    first, later = mean_scan(side, side), empty_scan(side, side)
    assert decoded(jpeg(side, side, first, *[later] * SCANS * 10)).size == (side, side)
    with pytest.raises(MediaError, match="scans"):
        decoded(jpeg(side, side, first, *[later] * SCANS * 16))


def test_a_jpeg_of_a_line_counts_for_the_blocks_that_it_has():
    first, later = mean_scan(50_000, 1), empty_scan(50_000, 1)
    with pytest.raises(MediaError, match="scans"):
        decoded(jpeg(50_000, 1, first, *[later] * SCANS))


@pytest.mark.parametrize(("mode", "scans"), [("L", 6), ("RGB", 10), ("CMYK", 18)])
def test_a_progressive_jpeg_of_as_many_pixels_as_are_allowed_is_read(mode, scans):
    content = progressive(mode)
    assert count_scans(content) == scans
    assert decoded(content).size == (SIDE, SIDE)


def test_scans_of_other_pictures_in_the_file_do_not_count():
    """A thumbnail in its metadata, a comment, and what phones put after the end: a smaller picture, a film."""
    exif = Image.Exif()
    exif[0x010E] = "FF DA"
    thumbnails = segment(0xE1, b"Exif\0\0" + b"\xff\xda" * 30_000) + segment(0xFE, b"\xff\xda" * 10_000)
    content = progressive("RGB", exif=exif)
    content = content[:2] + thumbnails + content[2:] + progressive("RGB") * 10 + b"\xff\xda" * 10_000
    assert count_scans(content) == 10
    assert decoded(content).size == (SIDE, SIDE)


@pytest.mark.parametrize("offset", range(-3, 3))
def test_a_marker_is_found_wherever_it_stands(offset):
    first = jpeg(SIDE, SIDE, FIRST)
    filled = first[:-2] + bytes(2**18 + offset - len(first) % 2**18)
    content = filled + LATER + bytes(2**18) + LATER + b"\xff\xd9"
    assert count_scans(content) == 3


def test_a_jpeg_of_a_hundred_thousand_segments_is_refused():
    for content in (
        jpeg(8, 8, mean_scan(8, 8), before=segment(0xE5, b"") * 100_000),
        jpeg(8, 8, mean_scan(8, 8), *[empty_scan(8, 8)] * 100_000),
    ):
        with pytest.raises(MediaError, match=f"more than {MAX_JPEG_SEGMENTS} segments"):
            decoded(content)
    assert decoded(jpeg(8, 8, mean_scan(8, 8), before=segment(0xE5, bytes(2000)) * 9000)).size == (8, 8)


@pytest.mark.parametrize("filler", [b"\xff", b"\xff\xd0", b"\xff\0"])
def test_a_jpeg_of_a_megabyte_of_filler_is_refused(filler):
    first = mean_scan(8, 8)
    with pytest.raises(MediaError, match="filler"):
        decoded(jpeg(8, 8, first, before=filler * 2**20))
    assert decoded(jpeg(8, 8, first, before=filler * 1000)).size == (8, 8)
    assert decoded(jpeg(8, 8, first + filler * 2**20)).size == (8, 8)


@pytest.mark.parametrize("frame", [0xC9, 0xCA])
def test_a_jpeg_in_arithmetic_coding_is_refused(frame):
    last = 0 if frame == 0xCA else 63
    scan = segment(0xDA, bytes([1, 1, 0, 0, last, 0])) + b"\x55" * 64
    with pytest.raises(MediaError, match="arithmetic"):
        decoded(jpeg(SIDE, SIDE, scan, frame=frame))


# -- PNG --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "repeated",
    [
        chunk(b"iCCP", b"x\0\0" + zeros(2**20)),
        chunk(b"zTXt", b"\0\0" + zlib.compress(bytes(2**20 - 2**12))),
        chunk(b"iTXt", b"\xff\0\1\0\xff\0\0" + zlib.compress(bytes(2**20 - 2**12))),
    ],
)
def test_a_png_of_many_things_to_inflate_is_refused(repeated):
    """Pillow inflates each and forgets it: a kilobyte of the file makes a megabyte."""
    for chunks in ((repeated * MAX_INFLATED_CHUNKS, repeated, PIXEL), (PIXEL, repeated * (MAX_INFLATED_CHUNKS + 1))):
        with pytest.raises(MediaError, match=f"more than {MAX_INFLATED_CHUNKS} compressed"):
            decoded(png(1, 1, *chunks))
    assert decoded(png(1, 1, repeated * 5, PIXEL)).size == (1, 1)


@pytest.mark.parametrize("kind", [b"abCd", b"IDAT"])
def test_a_png_of_a_hundred_thousand_chunks_is_refused(kind):
    many = chunk(kind, b"") * 100_000
    for chunks in ((many, PIXEL), (PIXEL, many)):
        with pytest.raises(MediaError, match=f"more than {MAX_PNG_CHUNKS} chunks"):
            decoded(png(1, 1, *chunks))
    assert decoded(png(1, 1, chunk(kind, b"") * 40_000, PIXEL)).size == (1, 1)


# -- BMP --------------------------------------------------------------------------------------------------


def test_a_bmp_in_run_length_encoding_is_refused():
    """Its decoder is in Python: two bytes would let it write a line of a million pixels, one by one."""
    with pytest.raises(MediaError, match="run-length"):
        decoded(run_length_bmp(SIDE * SIDE, 1))
