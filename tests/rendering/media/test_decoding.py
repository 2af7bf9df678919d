"""Bytes to pixels: as transformers reads them, and within limits."""

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from tests.rendering.media.images import MeanColour, chunk, data_url, encoded, pixel_bomb, png, text_bomb, zeros
from trio_pool_serve.errors import MediaError
from trio_pool_serve.rendering.media.decoding import FORMATS, decode_image
from trio_pool_serve.rendering.media.loader import features_of

pytestmark = pytest.mark.unit

MAX_PIXELS = 1_000_000


def gradient(mode: str) -> Image.Image:
    """Pixels that are all different, with whatever beside colour a mode has."""
    columns, rows = np.meshgrid(np.arange(12), np.arange(7))
    if mode == "I;16":
        return Image.fromarray((columns * 5000 + rows * 700).astype(np.uint16))
    channels = [columns * 20, rows * 30, columns * rows * 3, 255 - columns * 20]
    pixels = np.stack(channels, axis=-1).astype(np.uint8)
    return Image.fromarray(pixels, "RGBA").convert("RGB").convert(mode) if mode != "RGBA" else Image.fromarray(pixels)


KINDS = [
    ("PNG", "RGB"),
    ("PNG", "RGBA"),
    ("PNG", "LA"),
    ("PNG", "L"),
    ("PNG", "1"),
    ("PNG", "P"),
    ("PNG", "I;16"),
    ("JPEG", "RGB"),
    ("JPEG", "L"),
    ("JPEG", "CMYK"),
    ("WEBP", "RGB"),
    ("WEBP", "RGBA"),
    ("GIF", "P"),
    ("BMP", "RGB"),
]


def as_transformers_reads_it(content: bytes) -> np.ndarray:
    from transformers.image_utils import load_image

    return np.asarray(load_image(data_url(content)))


@pytest.mark.parametrize(("kind", "mode"), KINDS)
def test_pixels_are_those_that_transformers_reads(kind, mode):
    written = BytesIO()
    gradient(mode).save(written, kind)
    image = decode_image(written.getvalue(), MAX_PIXELS)
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), as_transformers_reads_it(written.getvalue()))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_upright(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    written = BytesIO()
    gradient("RGB").save(written, "PNG", exif=exif)
    image = decode_image(written.getvalue(), MAX_PIXELS)
    assert image.size == ((12, 7) if orientation < 5 else (7, 12))
    assert np.array_equal(np.asarray(image), as_transformers_reads_it(written.getvalue()))


def test_an_image_is_turned_upright_whatever_else_is_said_of_it():
    """Nothing of it is written anew: some could not be, and of megabytes it would take seconds."""
    orientation = struct.pack(">HHIHH", 0x0112, 3, 1, 6, 0)
    interpretation = struct.pack(">HHI4s", 0x0106, 2, 4, b"odd")  # a text, where there should be a number
    exif = b"MM\0*" + struct.pack(">IH", 8, 2) + interpretation + orientation + bytes(4)
    pixels = zlib.compress(bytes(2 * 5))
    assert decode_image(png(3, 5, chunk(b"eXIf", exif), chunk(b"IDAT", pixels)), MAX_PIXELS).size == (5, 3)


@pytest.mark.parametrize("transparency", [3, bytes(range(0, 256, 2))])
def test_a_palette_s_transparency_makes_no_difference(transparency):
    written = BytesIO()
    image = gradient("P")
    image.save(written, "PNG", transparency=transparency)
    assert np.array_equal(np.asarray(decode_image(written.getvalue(), MAX_PIXELS)), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_several_frames_the_first_counts(kind):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue", "green")]
    written = BytesIO()
    frames[0].save(written, kind, save_all=True, append_images=frames[1:], lossless=True)
    assert decode_image(written.getvalue(), MAX_PIXELS).getpixel((0, 0)) == (255, 0, 0)


def test_an_image_of_one_pixel_is_one():
    assert decode_image(encoded((7, 8, 9), (1, 1)), MAX_PIXELS).getpixel((0, 0)) == (7, 8, 9)


def test_the_processor_is_given_the_decoded_image():
    found = features_of(encoded((7, 8, 9)), MeanColour())
    assert found.arrays["pixel_values"].tolist() == [7, 8, 9]


# -- what is refused --------------------------------------------------------------------------------------


def test_an_image_of_too_many_pixels_is_refused_by_its_header():
    """There is not a single pixel in it, so it was not decoded."""
    with pytest.raises(MediaError, match="has 1000 × 1001 pixels; at most 1000000"):
        decode_image(png(1000, 1001), MAX_PIXELS)
    with pytest.raises(MediaError, match="broken"):
        decode_image(png(1000, 1000), MAX_PIXELS)


@pytest.mark.parametrize("pixels", [1_000_000, 800_000_000])
def test_an_image_that_unfolds_to_millions_of_pixels_is_refused_whatever_pillow_s_own_limit(pixels):
    with pytest.raises(MediaError, match="30000 × 30000"):
        decode_image(pixel_bomb(), pixels)


def test_a_limit_above_pillow_s_own_holds():
    size = (14_000, 13_000)  # Pillow refuses past 179 million pixels
    content = encoded(0, size, mode="1")
    assert decode_image(content, 200_000_000).size == size


def test_text_that_unfolds_is_refused():
    with pytest.raises(MediaError, match="broken"):
        decode_image(text_bomb(), MAX_PIXELS)


def test_a_colour_profile_that_unfolds_is_refused():
    with pytest.raises(MediaError, match="broken"):
        decode_image(png(1, 1, chunk(b"iCCP", b"x\0\0" + zeros(2**26))), MAX_PIXELS)


def test_a_frame_that_is_larger_than_its_image_counts():
    gif = bytearray(encoded(1, (2, 2), "GIF", mode="P"))
    at = gif.index(b",", 13 + 3 * 2 ** ((gif[10] & 7) + 1))
    gif[at + 5 : at + 9] = (60_000).to_bytes(2, "little") * 2
    with pytest.raises(MediaError, match="60000 × 60000"):
        decode_image(bytes(gif), MAX_PIXELS)


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.7", bytes(64)]
)
def test_what_is_no_image_is_refused(content):
    with pytest.raises(MediaError, match="PNG, JPEG, WEBP, GIF, BMP"):
        decode_image(content, MAX_PIXELS)


@pytest.mark.parametrize("kind", ["TIFF", "ICO", "PPM", "TGA", "EPS", "PDF"])
def test_other_formats_are_refused(kind):
    assert kind not in FORMATS
    with pytest.raises(MediaError, match="none of the formats"):
        decode_image(encoded(kind=kind), MAX_PIXELS)


@pytest.mark.parametrize("kind", FORMATS)
def test_an_image_that_ends_early_is_refused(kind):
    written = BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(written, kind)
    whole = written.getvalue()
    for end in range(20, len(whole) - 16, len(whole) // 9):
        with pytest.raises(MediaError):
            decode_image(whole[:end], MAX_PIXELS)


def test_an_image_without_any_pixel_is_refused():
    bmp = bytearray(encoded(kind="BMP"))
    bmp[18:22] = bytes(4)
    with pytest.raises(MediaError):
        decode_image(bytes(bmp), MAX_PIXELS)
