"""Bytes to pixels: as transformers reads them, within limits, and not at a cost that the pixels do not account for."""

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from tests.rendering.media.images import (
    chunk,
    data_url,
    empty_scan,
    encoded,
    jpeg,
    mean_scan,
    pixel_bomb,
    png,
    run_length_bmp,
    segment,
    text_bomb,
    zeros,
)
from trio_pool_serve.errors import MediaError
from trio_pool_serve.rendering.media.decoding import (
    FORMATS,
    MAX_INFLATED_CHUNKS,
    MAX_JPEG_SEGMENTS,
    MAX_PNG_CHUNKS,
    MAX_SCANS_AT_MAX_PIXELS,
    count_scans,
    decode_image,
)

pytestmark = pytest.mark.unit
MAX_PIXELS = 1_000_000


def decoded(content: bytes) -> Image.Image:
    return decode_image(content, MAX_PIXELS)


def saved(image: Image.Image, kind: str, **options) -> bytes:
    written = BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()


def gradient(mode: str) -> Image.Image:
    """Pixels that are all different, with whatever beside colour a mode has."""
    columns, rows = np.meshgrid(np.arange(12), np.arange(7))
    if mode == "I;16":
        return Image.fromarray((columns * 5000 + rows * 700).astype(np.uint16))
    channels = [columns * 20, rows * 30, columns * rows * 3, 255 - columns * 20]
    pixels = np.stack(channels, axis=-1).astype(np.uint8)
    return Image.fromarray(pixels, "RGBA").convert("RGB").convert(mode) if mode != "RGBA" else Image.fromarray(pixels)


MODES = {"PNG": "RGB RGBA LA L 1 P I;16", "JPEG": "RGB L CMYK", "WEBP": "RGB RGBA", "GIF": "P", "BMP": "RGB"}
KINDS = [(kind, mode) for kind, modes in MODES.items() for mode in modes.split()]


def as_transformers_reads_it(content: bytes) -> np.ndarray:
    from transformers.image_utils import load_image

    return np.asarray(load_image(data_url(content)))


@pytest.mark.parametrize(("kind", "mode"), KINDS)
def test_pixels_are_those_that_transformers_reads(kind, mode):
    content = saved(gradient(mode), kind)
    assert decoded(content).mode == "RGB"
    assert np.array_equal(np.asarray(decoded(content)), as_transformers_reads_it(content))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_upright(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = saved(gradient("RGB"), "PNG", exif=exif)
    assert decoded(content).size == ((12, 7) if orientation < 5 else (7, 12))
    assert np.array_equal(np.asarray(decoded(content)), as_transformers_reads_it(content))


def test_an_image_is_turned_upright_whatever_else_is_said_of_it():
    """Nothing of it is written anew: some could not be, and of megabytes it would take seconds."""
    orientation = struct.pack(">HHIHH", 0x0112, 3, 1, 6, 0)
    interpretation = struct.pack(">HHI4s", 0x0106, 2, 4, b"odd")  # a text, where there should be a number
    exif = b"MM\0*" + struct.pack(">IH", 8, 2) + interpretation + orientation + bytes(4)
    pixels = zlib.compress(bytes(2 * 5))
    assert decoded(png(3, 5, chunk(b"eXIf", exif), chunk(b"IDAT", pixels))).size == (5, 3)


@pytest.mark.parametrize("transparency", [3, bytes(range(0, 256, 2))])
def test_a_palette_s_transparency_makes_no_difference(transparency):
    image = gradient("P")
    ours = decoded(saved(image, "PNG", transparency=transparency))
    assert np.array_equal(np.asarray(ours), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_several_frames_the_first_counts(kind):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue", "green")]
    content = saved(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
    assert decoded(content).getpixel((0, 0)) == (255, 0, 0)


NO_IMAGES = [b"", b"hello", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.7", bytes(64)]
OTHERS = [encoded(kind=kind) for kind in ("TIFF", "ICO", "PPM", "TGA", "EPS", "PDF")]


@pytest.mark.parametrize("content", NO_IMAGES + OTHERS, ids=lambda content: content[:4].hex())
def test_what_is_no_image_and_other_formats_are_refused(content):
    with pytest.raises(MediaError, match="not in a supported format: PNG, JPEG, WEBP, GIF, BMP"):
        decoded(content)


def test_an_image_of_too_many_pixels_or_none_is_refused_by_its_header():
    """There is not a single pixel in it, so it was not decoded."""
    with pytest.raises(MediaError, match="has 1000 × 1001 pixels; the limit is 1000000"):
        decoded(png(1000, 1001))
    with pytest.raises(MediaError, match="broken"):
        decoded(png(1000, 1000))
    bmp = encoded(kind="BMP")
    with pytest.raises(MediaError):
        decoded(bmp[:18] + bytes(4) + bmp[22:])


@pytest.mark.parametrize("pixels", [1_000_000, 800_000_000])
def test_an_image_that_unfolds_to_millions_of_pixels_is_refused_whatever_pillow_s_own_limit(pixels):
    with pytest.raises(MediaError, match="30000 × 30000"):
        decode_image(pixel_bomb(), pixels)


def test_a_limit_above_pillow_s_own_holds():
    size = (14_000, 13_000)  # Pillow refuses past 179 million pixels
    content = encoded(0, size, mode="1")
    assert decode_image(content, 200_000_000).size == size


def test_text_or_a_colour_profile_that_unfolds_is_refused():
    for content in (text_bomb(), png(1, 1, chunk(b"iCCP", b"x\0\0" + zeros(2**26)))):
        with pytest.raises(MediaError, match="broken"):
            decoded(content)


def test_a_frame_that_is_larger_than_its_image_counts():
    gif = bytearray(encoded(1, (2, 2), "GIF", mode="P"))
    at = gif.index(b",", 13 + 3 * 2 ** ((gif[10] & 7) + 1))
    gif[at + 5 : at + 9] = (60_000).to_bytes(2, "little") * 2
    with pytest.raises(MediaError, match="60000 × 60000"):
        decoded(bytes(gif))


@pytest.mark.parametrize("kind", FORMATS)
def test_an_image_that_ends_early_is_refused(kind):
    whole = saved(noise("RGB", 40, 40), kind)
    for end in range(20, len(whole) - 16, len(whole) // 9):
        with pytest.raises(MediaError):
            decoded(whole[:end])


SIDE = 1000
SCANS = MAX_SCANS_AT_MAX_PIXELS
FIRST, LATER = mean_scan(SIDE, SIDE), empty_scan(SIDE, SIDE)
PIXEL = chunk(b"IDAT", zlib.compress(b"\0\0"))


def noise(mode: str, width: int, height: int) -> Image.Image:
    channels = {"L": (), "RGB": (3,), "CMYK": (4,)}[mode]
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, *channels), dtype=np.uint8), mode)


def progressive(mode: str, width: int = SIDE, height: int = SIDE, **options) -> bytes:
    return saved(noise(mode, width, height), "JPEG", progressive=True, **options)


def test_a_jpeg_whose_scans_change_nothing_is_refused():
    """Of an image of as many pixels as are allowed, every ten bytes would cost a pass over all of them."""
    assert len(LATER) < 20
    for scans in ([FIRST, *[LATER] * SCANS], [FIRST[:10]] * (SCANS + 1)):  # even scans without anything in them
        with pytest.raises(MediaError, match=f"1000 × 1000 pixels has {SCANS + 1} scans"):
            decoded(jpeg(SIDE, SIDE, *scans))
    assert decoded(jpeg(SIDE, SIDE, FIRST, *[LATER] * (SCANS - 1))).size == (SIDE, SIDE)


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
    """To the blocks that it has: a line counts for many."""
    for width, height, fine, refused in ((SIDE // 4, SIDE // 4, SCANS * 10, SCANS * 16), (50_000, 1, 0, SCANS)):
        first, later = mean_scan(width, height), empty_scan(width, height)
        assert decoded(jpeg(width, height, first, *[later] * fine)).size == (width, height)
        with pytest.raises(MediaError, match="scans"):
            decoded(jpeg(width, height, first, *[later] * refused))


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
    scan = segment(0xDA, bytes([1, 1, 0, 0, 0 if frame == 0xCA else 63, 0])) + b"\x55" * 64
    with pytest.raises(MediaError, match="arithmetic"):
        decoded(jpeg(SIDE, SIDE, scan, frame=frame))


def test_a_bmp_in_run_length_encoding_is_refused():
    """Its decoder is in Python: two bytes would let it write a line of a million pixels, one by one."""
    with pytest.raises(MediaError, match="run-length"):
        decoded(run_length_bmp(SIDE * SIDE, 1))


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
