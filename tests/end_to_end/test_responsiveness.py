"""The loop stays free while large requests are processed."""

import json
from pathlib import Path

import httpx
import pytest
import trio

from tests.conftest import listening, running
from tests.cpu_backend import BY_TORCH
from trio_pool_serve.config import Config, ModelConfig
from trio_pool_serve.service import Service
from trio_pool_serve.threads.offload import Offload

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("switch_interval_of_servers")]

TEXTS = {"input": [f"sentence number {n} about nothing in particular " * 12 for n in range(32)]}
# One word of two megabytes: of all texts that are truncated, the kind that takes longest to tokenise.
TWO_MEGABYTES = json.dumps({"input": "ab" * 1_000_000, "truncate_prompt_tokens": -1}).encode()


async def longest_pause(config: Config, *, in_threads: bool) -> float:
    """Return the longest time (seconds) for which a heartbeat on the loop did not beat."""
    pauses: list[float] = []
    async with (
        running(Service(config, offload=Offload(render=2, in_threads=in_threads))) as service,
        listening(service) as url,
        httpx.AsyncClient(base_url=url, timeout=600) as client,
    ):

        async def beat(*, task_status: trio.TaskStatus = trio.TASK_STATUS_IGNORED) -> None:
            task_status.started()
            while True:
                before = trio.current_time()
                await trio.sleep(0.001)
                pauses.append(trio.current_time() - before)

        async def post(content: bytes) -> None:
            answer = await client.post("/v1/embeddings", content=content, headers={"Content-Type": "application/json"})
            assert answer.status_code == 200

        await post(b'{"input": "warm"}')
        async with trio.open_nursery() as nursery:
            await nursery.start(beat)
            async with trio.open_nursery() as requests:
                requests.start_soon(post, json.dumps(TEXTS).encode())
                requests.start_soon(post, TWO_MEGABYTES)
            nursery.cancel_scope.cancel()
    return max(pauses)


async def test_offloading_keeps_the_loop_free(minilm: Path):
    config = Config(models=(str(minilm),), loading=ModelConfig(max_model_len=512, **BY_TORCH))
    # Whatever else the machine does can only lengthen a pause: the better of two runs is nearer to the truth.
    with_threads = min([await longest_pause(config, in_threads=True) for _ in range(2)])
    without = min([await longest_pause(config, in_threads=False) for _ in range(2)])
    assert without >= 5 * with_threads, f"{without * 1e3:.1f} ms without threads, {with_threads * 1e3:.1f} ms with"
