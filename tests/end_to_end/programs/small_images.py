"""A plugin: the server decodes images of a megapixel at most, and keeps none."""

from trio_pool_serve.rendering.media import decoding, loader

MOST_PIXELS = 2**20

decoding.MAX_PIXELS = MOST_PIXELS
loader.CACHED_PART = 2**62
