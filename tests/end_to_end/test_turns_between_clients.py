"""A client's text is tokenised in its turn, whatever another client has waiting."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import trio

from tests.conftest import NO_AUTHORITIES, listening, running
from tests.scripted_runner import ScriptedRunner
from tests.server.server_process import until
from tests.tasks.test_fan_out import NotingTokenizer
from trio_pool_serve.config import Config, ThreadsConfig
from trio_pool_serve.service import Service

FLOOD = 40
LONG_TEXT = "It was the best of times. " * 2400
"""60 KB. Its body is decoded on the loop, so that all of the flood wait to be tokenised."""
TEXT = "The quick brown fox jumps over the lazy dog. " * 58


@pytest.fixture
async def service(minilm: Path) -> AsyncIterator[Service]:
    """MiniLM's tokenizer in one thread, in front of a scripted runner."""
    config = Config(models=(str(minilm),), threads=ThreadsConfig(renderer_num_workers=1))
    async with running(Service(config, lambda *_: ScriptedRunner())) as ready:
        yield ready


def client_at(address: str, url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    transport = httpx.AsyncHTTPTransport(local_address=address, verify=NO_AUTHORITIES, limits=limits)
    return httpx.AsyncClient(base_url=url, timeout=300, transport=transport)


async def test_a_text_is_tokenised_in_its_turn_beside_40_long_ones_of_another_address(service, minilm: Path):
    """Before clients took turns, it was tokenised behind all 40."""
    noting = NotingTokenizer(minilm)
    free = service.model().renderer.texts.tokenizers._free
    free.pop()
    free.append(noting)
    answered: list[int] = []

    async def embed(client: httpx.AsyncClient, text: str) -> None:
        response = await client.post("/v1/embeddings", json={"input": text, "truncate_prompt_tokens": -1})
        answered.append(response.status_code)

    async def wait_until_waiting(count: int) -> None:
        await until(lambda: service.offload.statistics()["render"].waiting >= count)

    async with (
        listening(service) as url,
        client_at("127.0.0.1", url) as flooding,
        client_at("127.0.0.2", url) as other,
        trio.open_nursery() as nursery,
    ):
        noting.gate.clear()
        for _ in range(FLOOD):
            nursery.start_soon(embed, flooding, LONG_TEXT)
        await wait_until_waiting(FLOOD - 1)
        assert noting.entered.is_set()
        nursery.start_soon(embed, other, TEXT)
        await wait_until_waiting(FLOOD)
        noting.gate.set()
    assert answered == [200] * (FLOOD + 1)
    assert len(noting.texts) == FLOOD + 1
    assert noting.texts.index(TEXT) <= 2, "behind the one that was being tokenised, and the one that was ready"
