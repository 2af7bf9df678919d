"""Encoded images to pixels. Everything here blocks: it is called in ``media`` work."""

from io import BytesIO

from attrs import frozen
from PIL import Image, ImageOps, UnidentifiedImageError

from trio_pool_serve.errors import MediaError
from trio_pool_serve.rendering.image_format import ImageProcessor
from trio_pool_serve.types import ImageFeatures
from trio_pool_serve.worker_processes import prepare_worker

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What browsers show. Pillow reads dozens of others, each by a parser of its own."""

Image.MAX_IMAGE_PIXELS = None  # the limit is a setting, and looked at below, before any pixel is decoded


@frozen
class MediaLimits:
    """How large an image may be: bytes as it is sent or stored, and pixels."""

    max_bytes: int
    max_pixels: int


def decode_image(encoded: bytes, limits: MediaLimits) -> Image.Image:
    """Return the image that some bytes are, upright, in RGB, as transformers' ``load_image`` does.

    Of several frames the first counts. Raises ``MediaError`` for what is no image, is not whole, or has more pixels
    than the limit, which is seen from its header.
    """
    if len(encoded) > limits.max_bytes:
        raise too_large(limits.max_bytes)
    try:
        with Image.open(BytesIO(encoded), formats=FORMATS) as image:
            pixels = image.width * image.height
            if 1 <= pixels <= limits.max_pixels:
                return _upright_rgb(image)
    except UnidentifiedImageError as error:
        raise MediaError(f"An image is in none of the formats that are read: {', '.join(FORMATS)}.") from error
    except Exception as error:  # parsers of bytes that anybody may have made raise whatever they meet
        raise MediaError("An image is broken: it cannot be decoded.") from error
    raise MediaError(f"An image has {image.width} × {image.height} pixels; at most {limits.max_pixels} are decoded.")


def _upright_rgb(image: Image.Image) -> Image.Image:
    ImageOps.exif_transpose(image, in_place=True)
    image.load()
    image.info.pop("transparency", None)  # it would not outlive the conversion, and Pillow warns of some kinds
    return image.convert("RGB")


def features_of(encoded: bytes, processor: ImageProcessor, limits: MediaLimits) -> ImageFeatures:
    """Return what a processor makes of an encoded image. Raises ``MediaError``."""
    return processor(decode_image(encoded, limits))


def prepare_process(*processors: ImageProcessor) -> None:
    """Make a process ready for images: a processor loads what it needs with the first one that it is given."""
    prepare_worker()
    for processor in processors:
        processor(Image.new("RGB", (64, 48)))


def too_large(max_bytes: int) -> MediaError:
    """Return the error for an image of too many bytes."""
    return MediaError(f"An image is larger than {max_bytes} bytes.")
