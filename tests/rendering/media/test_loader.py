"""From URLs to features, and everything that may go wrong between."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_network

import pytest
import trio

from tests.conftest import until
from tests.rendering.media.image_server import says, serving
from tests.rendering.media.images import GREEN, RED, MeanColour, data_url, encoded
from trio_pool_serve.config import InputConfig
from trio_pool_serve.errors import InvalidRequestError, MediaError
from trio_pool_serve.prompts import ImagePart
from trio_pool_serve.rendering.media import loader as loader_module
from trio_pool_serve.rendering.media.loader import MAX_URL, MediaLoader
from trio_pool_serve.rendering.memory_budget import MemoryBudget, Reservation
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Client, ImageFeatures

CLIENT = Client("a")
IMAGE = ImagePart(data_url(encoded()))


@asynccontextmanager
async def loading(**settings) -> AsyncIterator[MediaLoader]:
    loader = MediaLoader(InputConfig(**settings), Offload(media=2))
    async with trio.open_nursery() as nursery:
        await nursery.start(loader.cache.run)
        yield loader
        await wait_idle(loader)
        nursery.cancel_scope.cancel()


async def load(loader: MediaLoader, part: ImagePart, processor: MeanColour) -> ImageFeatures:
    held = Reservation(loader.memory, CLIENT)
    try:
        return await loader.load(await loader.fetch(part, held), processor, CLIENT)
    finally:
        held.release()


async def wait_idle(loader: MediaLoader) -> None:
    await until(lambda: not loader.offload.statistics()["media"].borrowed)  # threads that were running finish
    assert loader.cache.statistics().in_flight == 0
    assert loader.fetcher.turns.statistics().borrowed == 0


def colour(features: ImageFeatures) -> tuple[int, ...]:
    return tuple(features.arrays["pixel_values"].astype(int).tolist())


async def test_the_same_bytes_are_the_same_image_wherever_they_are(tmp_path):
    (tmp_path / "image.png").write_bytes(encoded())
    processor = MeanColour()
    async with (
        loading(allowed_media_domains="127.0.0.0/8", allowed_media_path=tmp_path) as loader,
        serving({"/image": says(encoded())}) as server,
    ):
        urls = [IMAGE.url, server.url("/image"), server.url("/image"), (tmp_path / "image.png").as_uri()]
        found = [await load(loader, ImagePart(url), processor) for url in urls]
        assert {colour(features) for features in found} == {RED}
        assert len(set(map(id, found))) == processor.calls == 1
        assert len(server.heads) == 2
        other = ImagePart(data_url(encoded(GREEN)))
        assert colour(await load(loader, other, processor)) == GREEN
        assert colour(await load(loader, IMAGE, MeanColour("another"))) == RED
        assert (loader.cache.statistics().misses, loader.cache.statistics().hits) == (3, 3)


SCHEMES = "data:, http:, https: or file:"
LONG = [scheme.ljust(MAX_URL + 1, "a") for scheme in ("http://a.org/", "https://a.org/", "file:///")]


@pytest.mark.parametrize(
    ("urls", "told"),
    [
        (["", "image.png", "ftp://host/a", "javascript:1", "//host/a", " data:;base64,"], SCHEMES),
        (LONG, "more than 8192 characters"),
    ],
    ids=["other", "long"],
)
async def test_other_and_long_urls_are_refused(urls, told):
    async with loading() as loader:
        for url in urls:
            with pytest.raises(InvalidRequestError, match=told):
                await load(loader, ImagePart(url), MeanColour())


async def test_an_image_in_its_url_may_be_as_large_as_a_file(monkeypatch):
    monkeypatch.setattr(loader_module, "MAX_FILE_BYTES", 10)
    async with loading() as loader:
        with pytest.raises(MediaError, match="10 bytes"):
            await load(loader, IMAGE, MeanColour())


def test_limits_follow_the_limits_of_bodies_and_memory():
    """An image may be as large as a body, and an eighth of the memory budget is for the cache."""
    sizes = [MediaLoader(InputConfig(), Offload(), max_body_bytes=most).max_bytes for most in (1, 2**25)]
    assert sizes == [20 * 2**20, 2**25]
    assert MediaLoader(InputConfig(), Offload(), MemoryBudget(8000)).cache.max_bytes == 1000


@pytest.mark.parametrize(
    ("listed", "url", "told"),
    [
        ("example.org, *.b.test, 10.0.0.0/8", "http://example.com/", "--allowed-media-domains"),
        ("10.0.0.0/8", "http://localhost/", "--allowed-media-domains"),
        ("*,10.0.0.0/8", "http://localhost/", "no address"),
        ("", "http://localhost/", "no address"),
    ],
)
async def test_settings_restrict_hosts_and_networks_alone_allow_no_host_by_its_name(listed, url, told):
    """Otherwise a list that once named one private address would open every public host."""
    async with loading(allowed_media_domains=listed) as loader:
        assert list(loader.fetcher.networks) == ([ip_network("10.0.0.0/8")] if "10" in listed else [])
        with pytest.raises(InvalidRequestError if told == "--allowed-media-domains" else MediaError, match=told):
            await load(loader, ImagePart(url), MeanColour())
        assert repr(loader) == ("<MediaLoader <MediaCache 0 in 0/268435456 bytes, 0 in flight>, <ImageFetcher 0/32+0>>")


@pytest.mark.parametrize(
    "wrong", ["https://example.org", "example.org:80", "ä.org", "a@b", "10.0.0.1/8", "10.0.0.0/33", "example.org/8"]
)
def test_what_is_neither_a_host_nor_a_network_is_refused(wrong):
    with pytest.raises(ValueError, match=f"--allowed-media-domains: `{wrong}` is neither a host nor a network"):
        InputConfig(allowed_media_domains=f"example.org, {wrong}")
