"""A plugin of a server: it keeps no prepared image, so that each is a new one."""

from trio_pool_serve.rendering.media import loader

loader.CACHED_PART = 2**62
