"""Encoded images, good and hostile, and what scripted models read of them."""

import base64
import struct
import threading
import zlib
from io import BytesIO

import numpy as np
from attrs import define, field
from PIL import Image

from trio_pool_serve.types import ImageFeatures, RenderedPrompt, TokenIds

RED, GREEN = (200, 10, 20), (10, 100, 30)


def encoded(colour=RED, size=(8, 6), kind="PNG", mode="RGB", **options) -> bytes:
    written = BytesIO()
    Image.new(mode, size, colour).save(written, kind, **options)
    return written.getvalue()


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    """A grey PNG of one bit per pixel with whatever chunks."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunks) + chunk(b"IEND", b"")


def zeros(count: int) -> bytes:
    """Many zeros, compressed to a thousandth."""
    compressor = zlib.compressobj(9)
    megabyte = bytes(2**20)
    return b"".join(compressor.compress(megabyte) for _ in range(count // 2**20)) + compressor.flush()


def pixel_bomb() -> bytes:
    """30,000 × 30,000 pixels, all of them there: 112 MB once unpacked, 110 kB as it is."""
    return png(30_000, 30_000, chunk(b"IDAT", zeros(30_000 * 3751 + 2**20)))


def text_bomb() -> bytes:
    """A single pixel, and 64 MB of text about it."""
    return png(1, 1, chunk(b"zTXt", b"Comment\0\0" + zeros(2**26)), chunk(b"IDAT", zlib.compress(b"\0\0")))


@define(eq=False)
class MeanColour:
    """A processor that takes an image for its mean colour; it may be held up."""

    key: str = "mean colour"
    calls: int = field(default=0, init=False)
    error: Exception | None = None
    entered: threading.Event = field(factory=threading.Event, init=False)
    gate: threading.Event = field(factory=threading.Event, init=False)

    def __attrs_post_init__(self):
        self.gate.set()

    def __call__(self, image: Image.Image) -> ImageFeatures:
        self.calls += 1
        self.entered.set()
        assert self.gate.wait(60)
        if self.error is not None:
            raise self.error
        mean = np.asarray(image, dtype=np.float32).mean(axis=(0, 1)).round()
        return ImageFeatures({"pixel_values": mean}, tokens=(3,))


@define(eq=False)
class ColourFormat:
    """Three tokens for an image: its red, green and blue."""

    processor: MeanColour = field(factory=MeanColour)

    def alone(self, image: ImageFeatures) -> RenderedPrompt:
        return RenderedPrompt(image.arrays["pixel_values"].astype(np.int32), images=image)

    def expand(self, token_ids: TokenIds, images: list[ImageFeatures]) -> RenderedPrompt:
        ids = [image.arrays["pixel_values"].astype(np.int32) for image in images]
        return RenderedPrompt(np.concatenate([token_ids, *ids]))
