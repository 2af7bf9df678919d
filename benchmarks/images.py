"""Images to measure with, and what image processors make of them."""

import io
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from trio_pool_serve.types import ImageFeatures

SIDE = 1024
"""Pixels: a square of one megapixel."""

PROCESSORS = ("CLIPImageProcessorPil", "Qwen2VLImageProcessorPil")
"""As transformers names them. CLIP's cuts every image down to 3 × 224 × 224; Qwen-VL's keeps nearly all pixels."""


def encoded_image(form: str) -> bytes:
    """Return an image of one megapixel as ``JPEG`` or ``PNG``: smooth shapes with the noise that a camera adds."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    waves = np.stack([np.sin(7 * x + 3 * y), np.cos(5 * y * x), np.sin(11 * (x - y))], axis=-1)
    pixels = 128 + 90 * waves + random.normal(0, 6, (SIDE, SIDE, 3))
    written = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(written, form)
    return written.getvalue()


@cache
def processor_named(name: str) -> Any:
    """Return a processor as it is without any file."""
    import transformers

    return getattr(transformers, name)()


def image_features(encoded: bytes, processor: str) -> ImageFeatures:
    """Decode an image and have it processed."""
    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    made: Mapping[str, Any] = processor_named(processor)(images=image, return_tensors="np")
    return ImageFeatures({name: np.asarray(array) for name, array in made.items()}, (1,))


def prepare_processors() -> None:
    """Import what takes a while."""
    for name in PROCESSORS:
        processor_named(name)
