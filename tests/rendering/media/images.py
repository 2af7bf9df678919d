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


def jpeg(width: int, height: int, *scans: bytes, frame: int = 0xC2, before: bytes = b"") -> bytes:
    """A grey JPEG, progressive if nothing else is said, of whatever scans, and segments before its frame."""
    tables = segment(0xDB, bytes([0]) + bytes([1]) * 64)
    tables += segment(0xC4, bytes([0x00, 1, *[0] * 15, 0]))  # no difference: 0
    tables += segment(0xC4, bytes([0x10, 0, 0, 0, 15, *[0] * 12, *(n << 4 for n in range(15))]))  # 2 ** n empty blocks
    header = struct.pack(">BHHBBBB", 8, height, width, 1, 1, 0x11, 0)
    return b"\xff\xd8" + before + tables + segment(frame, header) + b"".join(scans) + b"\xff\xd9"


def segment(kind: int, content: bytes) -> bytes:
    return bytes([0xFF, kind]) + struct.pack(">H", len(content) + 2) + content


def mean_scan(width: int, height: int) -> bytes:
    """The first scan of a progressive JPEG: every block is grey."""
    blocks = -(-width // 8) * -(-height // 8)
    return segment(0xDA, bytes([1, 1, 0, 0, 0, 0])) + bytes(-(-blocks // 8))


def empty_scan(width: int, height: int) -> bytes:
    """A later scan, in which nothing changes: runs of 2 ** 14 blocks and more, of three or four bytes each."""
    left = -(-width // 8) * -(-height // 8)
    bits = ""
    while left:
        run = min(left, 2**15 - 1)
        power = run.bit_length() - 1
        bits += f"{power:04b}" + bin(run)[3:]
        left -= run
    bits += "1" * (-len(bits) % 8)
    runs = int(bits, 2).to_bytes(len(bits) // 8)
    return segment(0xDA, bytes([1, 1, 0, 1, 63, 0x10])) + runs.replace(b"\xff", b"\xff\0")


def run_length_bmp(width: int, height: int) -> bytes:
    """A BMP whose every line ends where it begins: two bytes for as many pixels as it is wide."""
    lines = b"\x01\0\0\0" * height + b"\0\x01"
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(lines), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 1078 + len(lines), 0, 0, 1078) + header + bytes(1024) + lines
