"""Real models that are loaded and unloaded under traffic: nothing fails, nothing is left behind, memory comes back."""

import gc
import threading
from pathlib import Path

import httpx
import psutil
import pytest
import trio

from tests.conftest import client_of, listening, render_templates_on_the_loop, running
from tests.model_folders import write_word_tokenizer
from tests.scarcity import open_files
from tests.server.server_process import LAUNCHER, START_LIMIT_S, launched, until
from tests.serving.changing_models import ADMIN
from trio_pool_serve.config import Config, ModelChangesConfig, ModelConfig, NetworkConfig, ProcessesConfig
from trio_pool_serve.processes.allocator import return_freed_memory
from trio_pool_serve.service import Service

CYCLES = 20

PAUSE_S = 0.01
"""Between two requests, so that client and server, in one process here, leave the interpreter to the load."""

WIDTH, LAYERS = 512, 2

WEIGHTS = WIDTH * WIDTH * 12 * LAYERS * 4
"""Bytes: 25 MB."""

MOST_GROWTH = 6 * WEIGHTS
"""Of the process, whose malloc has as many heaps as it likes: 17 models that stayed would take three times as much."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model, and a larger one with random weights."""
    import torch
    from transformers import BertConfig, BertModel

    made = []
    for name, width, layers in (("tiny", 32, 1), ("other", WIDTH, LAYERS)):
        folder = tmp_path_factory.mktemp("models") / name
        write_word_tokenizer(folder)
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=210,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=4 * width,
            max_position_embeddings=64,
        )
        BertModel(config).save_pretrained(folder)
        made.append(folder)
    return made[0], made[1]


def resident() -> int:
    gc.collect()
    return_freed_memory()
    return psutil.Process().memory_info().rss


@pytest.mark.slow
async def test_a_model_that_comes_and_goes_under_traffic_leaves_nothing_behind(folders, tmp_path):
    tiny, other = folders
    config = Config(
        models=(f"tiny={tiny}",),
        loading=ModelConfig(backend="torch", cache_dir=str(tmp_path / "cache"), dtype="float32"),
        network=NetworkConfig(api_key="admin-key"),
        processes=ProcessesConfig(engine="local", replicas=2),
        model_changes=ModelChangesConfig(model_api=True),
    )
    service = Service(config)
    render_templates_on_the_loop(service)
    async with running(service), listening(service) as url, client_of(url) as client:
        expected = [await embed(client, "tiny", number) for number in range(4)]
        of_other = None
        sent = 0

        async def traffic() -> None:
            nonlocal sent
            async with client_of(url) as own:
                while True:
                    assert await embed(own, "tiny", sent % 4) == pytest.approx(expected[sent % 4], abs=1e-5)
                    sent += 1
                    await trio.sleep(PAUSE_S)

        async def cycle() -> int:
            nonlocal of_other
            loaded = await client.post("/v1/models", json={"model": str(other), "name": "other"}, headers=ADMIN)
            assert loaded.status_code == 200, loaded.text
            vector = await embed(client, "other", 0)
            of_other = of_other or vector
            assert vector == pytest.approx(of_other, abs=1e-5)
            assert (await client.delete("/v1/models/other", headers=ADMIN)).status_code == 200
            return loaded.json()["memory_bytes"]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(traffic)
            for _ in range(3):  # libraries and caches that stay
                await cycle()
            before, tasks = (resident(), open_files()), trio.lowlevel.current_statistics().tasks_living
            for _ in range(CYCLES - 3):
                assert await cycle() > WEIGHTS / 2
            after = resident(), open_files()
            assert after[0] - before[0] < MOST_GROWTH
            assert after[1] <= before[1] + 1
            assert trio.lowlevel.current_statistics().tasks_living <= tasks + 2
            nursery.cancel_scope.cancel()
        assert sent > CYCLES  # others were answered meanwhile
        await until(lambda: "load" not in [thread.name for thread in threading.enumerate()])
        assert list(service.served) == ["tiny"]


async def embed(client: httpx.AsyncClient, model: str, number: int) -> list[float]:
    body = {"model": model, "input": f"w{number} hello world"}
    answer = await client.post("/v1/embeddings", json=body, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"][0]["embedding"]


@pytest.mark.slow
async def test_the_memory_of_a_model_is_that_of_its_engine_processes(folders, tmp_path):
    _, other = folders
    gauge = 'trio_pool_serve_model_memory_bytes{model="other",of="resident"} '
    flags = ("--engine", "process", "--dtype", "float32")
    command = [*LAUNCHER[:-1], "2"]  # replicas
    async with (
        launched(tmp_path, f"other={other}", *flags, command=command) as server,
        client_of(server.url) as client,
    ):
        with trio.fail_after(START_LIMIT_S):
            while True:  # a server is ready with the first engine process
                card = (await client.get("/v1/models/other")).json()
                load = (await client.get("/load")).json()["models"]["other"]
                parts = [replica["memory_bytes"] for replica in load["replicas"].values() if "memory_bytes" in replica]
                if len(parts) == 2 and card["memory_bytes"] == sum(parts):
                    break
                await trio.sleep(PAUSE_S)
        metrics = (await client.get("/metrics")).text
        assert min(parts) > WEIGHTS / 2
        assert load["memory_bytes"] == sum(parts)
        assert float(metrics.partition(gauge)[2].partition("\n")[0]) == sum(parts)
        assert "device_memory_bytes" not in card  # on a CPU
