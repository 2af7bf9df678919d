"""Loads images by URL and prepares them for a model."""

import hashlib
from functools import partial

from attrs import Factory, define, evolve, field

from trio_pool_serve.config import InputConfig
from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.prompts import ImagePart
from trio_pool_serve.rendering.media.cache import MediaCache
from trio_pool_serve.rendering.media.encoded_image import read_data_url, read_file_url
from trio_pool_serve.rendering.media.fetching import ImageFetcher
from trio_pool_serve.rendering.media.image_format import FolderProcessor
from trio_pool_serve.rendering.memory_budget import MemoryBudget, Reservation
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Client, ImageFeatures

MAX_URL = 8192
"""Maximum characters of a URL other than a ``data:`` URL."""

MAX_FILE_BYTES = 20 * 2**20
"""Maximum size of an image file, unless a request body may be larger. A photo has a few megabytes."""

CACHED_PART = 8
"""The memory budget divided by this is the cache's maximum: 256 MiB by default, 400 images of CLIP."""


@define(eq=False)
class MediaLoader:
    """Loads images by URL, for all models of a server; blocking work runs in ``media`` threads."""

    config: InputConfig
    offload: Offload
    memory: MemoryBudget = Factory(MemoryBudget)
    max_body_bytes: int = 0
    cache: MediaCache = field(
        init=False,
        default=Factory(lambda self: MediaCache(self.memory.max_bytes // CACHED_PART, self.memory), takes_self=True),
    )
    fetcher: ImageFetcher = field(
        init=False,
        default=Factory(
            lambda self: ImageFetcher(
                self.offload,
                self.max_bytes,
                domains=self.config.media_entries,  # networks, too: with networks alone, no host name is allowed
                networks=[network for network in self.config.media_entries.values() if network is not None],
            ),
            takes_self=True,
        ),
    )

    @property
    def max_bytes(self) -> int:
        """Maximum size of an image file."""
        return max(MAX_FILE_BYTES, self.max_body_bytes)

    async def fetch(self, part: ImagePart, held: Reservation) -> ImagePart:
        """Return an image with its bytes if its URL is fetched over HTTP; else as it is.

        Raises ``InvalidRequestError`` for a URL that cannot be one of an image, and as ``ImageFetcher.fetch``.
        Cancellation: at once.
        """
        match part.url[:MAX_URL].partition(":")[0].lower():  # a data: URL may be megabytes long
            case "data":
                return part
            case "http" | "https" if len(part.url) <= MAX_URL:
                return evolve(part, fetched=await self.fetcher.fetch(part.url, held))
            case "file" if len(part.url) <= MAX_URL:
                return part
            case "http" | "https" | "file":
                raise InvalidRequestError(f"The URL of the image has more than {MAX_URL} characters.")
        raise InvalidRequestError("The URL of the image must begin with data:, http:, https: or file:.")

    async def load(self, part: ImagePart, processor: FolderProcessor, client: Client) -> ImageFeatures:
        """Return the features of an image that ``fetch`` returned, from the cache if it has its bytes.

        A client's turn lasts until its image is prepared. Raises ``InvalidRequestError`` for a URL that is malformed or
        not allowed; ``MediaError`` for an image that cannot be decoded or is too large; and the processor's errors.

        Cancellation: at once; a thread that works on this image keeps its limiter token until it finishes.
        """
        async with self.offload.preparing.turn(client.number):
            content, digest = await self.offload.run("media", partial(self._read, part), abandon_on_cancel=True)

            async def prepare() -> ImageFeatures:
                compute = partial(features_of, content, processor)
                async with self.memory.preparing(client.number):
                    return await self.offload.run("media", compute, abandon_on_cancel=True)

            features = await self.cache.get((processor.key, digest), prepare)
            await self.memory.wait_until_below_limit()  # cached features are copied for each row
        return features

    def _read(self, part: ImagePart) -> tuple[bytes, bytes]:
        """Return an image's bytes as sent or stored, and their SHA-256."""
        if part.fetched is not None:
            content = b"".join(part.fetched)
        elif part.url[:5].lower() == "data:":
            content = read_data_url(part.url, self.max_bytes)
        else:
            content = read_file_url(part.url, self.config.allowed_media_path, self.max_bytes)
        return content, hashlib.sha256(content).digest()

    def __repr__(self) -> str:
        return f"<MediaLoader {self.cache!r}, {self.fetcher!r}>"


def features_of(encoded: bytes, processor: FolderProcessor) -> ImageFeatures:
    """Return the features of an encoded image. Raises ``MediaError``. Blocks."""
    from trio_pool_serve.rendering.media import decoding  # imported here: PIL takes 10 ms

    return processor(decoding.decode_image(encoded, decoding.MAX_PIXELS))
