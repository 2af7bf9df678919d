"""Decodes images to pixels. Blocking: runs in ``media`` threads."""

from io import BytesIO

from PIL import ExifTags, Image, UnidentifiedImageError
from PIL.ImageFile import ImageFile

from trio_pool_serve.errors import MediaError
from trio_pool_serve.rendering.media.decoding_bounds import count_scans, has_too_many_scans

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
"""Of an image. Cameras of phones take up to 50 megapixels; decoding them takes up to 800 MB."""

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
        raise MediaError(f"An image is in none of the formats that are read: {', '.join(FORMATS)}.") from error
    except Exception as error:  # parsers raise various errors for invalid bytes
        raise MediaError("An image is broken: it cannot be decoded.") from error


def _require_bounded(image: ImageFile, scans: int, max_pixels: int) -> None:
    width, height = image.size
    if not 1 <= width * height <= max_pixels:
        raise MediaError(f"An image has {width} × {height} pixels; at most {max_pixels} are decoded.")
    if has_too_many_scans(scans, width, height, max_pixels):
        raise MediaError(f"An image of {width} × {height} pixels has {scans} scans, too many to decode them.")
    if any(tile.codec_name == "bmp_rle" for tile in image.tile):
        # Pillow's decoder for these is in Python: 7 s for an image of a kilobyte, holding the interpreter lock.
        raise MediaError("An image is a BMP in run-length encoding, which is not read.")


def _upright_rgb(image: Image.Image) -> Image.Image:
    image.load()  # metadata can come after the pixels
    image.info.pop("transparency", None)  # the conversion drops it anyway, and Pillow warns about some forms of it
    # ImageOps.exif_transpose would rewrite all EXIF data, which is not used: 10 s for 20 MB, in 1.3 GB.
    transposition = EXIF_TRANSPOSITIONS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    rgb = image.convert("RGB")
    return rgb if transposition is None else rgb.transpose(transposition)
