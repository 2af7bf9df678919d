"""Loads images by URL and prepares them for a model."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import trio
from attrs import Factory, define, field

from trio_pool_serve.config import InputConfig
from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.prompts import ImagePart
from trio_pool_serve.rendering.media.addresses import is_any_address, is_public
from trio_pool_serve.rendering.media.cache import MediaCache
from trio_pool_serve.rendering.media.decoding import MediaLimits, features_of
from trio_pool_serve.rendering.media.encoded_image import EncodedImage, image_of_chunks, read_data_url, read_file_url
from trio_pool_serve.rendering.media.fetching import ImageFetcher
from trio_pool_serve.rendering.media.image_processor import ImageProcessor
from trio_pool_serve.rendering.memory_budget import MemoryBudget
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import ImageFeatures

T = TypeVar("T")

MAX_URL = 8192
"""Maximum characters of a URL other than a ``data:`` URL."""


@define(eq=False)
class MediaLoader:
    """Loads images by URL, for all models of a server; blocking work runs in ``media`` threads."""

    config: InputConfig
    timeout_s: float
    offload: Offload
    memory: MemoryBudget = Factory(MemoryBudget)
    cache: MediaCache = field(init=False)
    fetcher: ImageFetcher = field(init=False)
    limits: MediaLimits = field(init=False)

    def __attrs_post_init__(self) -> None:
        config = self.config
        self.cache = MediaCache(config.media_cache_bytes, self.memory)
        self.limits = MediaLimits(config.max_media_bytes, config.max_image_pixels)
        self.fetcher = ImageFetcher(
            self.offload,
            self.timeout_s,
            config.max_media_bytes,
            domains=config.media_domains,
            is_allowed=is_any_address if config.allow_private_media else is_public,
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Prepare images until cancelled. Cancellation: as ``MediaCache.run``."""
        await self.cache.run(task_status=task_status)

    async def load(self, part: ImagePart, processor: ImageProcessor) -> ImageFeatures:
        """Return the features of an image, from the cache if the same bytes were prepared before.

        Raises ``InvalidRequestError`` for a URL that is malformed or not allowed; ``MediaError`` for an image that
        cannot be fetched or decoded, is too large, or does not arrive in time; and what the processor raises.

        Cancellation: at once; a thread that works on this image keeps its limiter token until it finishes.
        """
        image = await self._encoded(part.url)

        async def prepare() -> ImageFeatures:
            async with self.memory.preparing():
                return await self._in_thread(partial(features_of, image.content, processor, self.limits))

        features = await self.cache.get((processor.key, image.digest), prepare)
        await self.memory.wait_until_below_limit()  # cached features are copied for each row
        return features

    async def _encoded(self, url: str) -> EncodedImage:
        match url[:MAX_URL].partition(":")[0].lower():  # a data: URL may be megabytes long
            case "data":
                return await self._in_thread(partial(read_data_url, url, self.config.max_media_bytes))
            case "http" | "https" if len(url) <= MAX_URL:
                return await self._in_thread(partial(image_of_chunks, await self.fetcher.fetch(url)))
            case "file" if len(url) <= MAX_URL:
                read = partial(read_file_url, url, self.config.allowed_media_path, self.config.max_media_bytes)
                return await self._in_thread(read)
            case "http" | "https" | "file":
                raise InvalidRequestError(f"The URL of an image has more than {MAX_URL} characters.")
        raise InvalidRequestError("The URL of an image must begin with data:, http:, https: or file:.")

    async def _in_thread(self, blocking: Callable[[], T]) -> T:
        return await self.offload.run("media", blocking, abandon_on_cancel=True)

    def __repr__(self) -> str:
        return f"<MediaLoader {self.cache!r}, {self.fetcher!r}>"
