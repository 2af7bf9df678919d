"""A server over one model with several adapters: each answer is what PEFT computes, however requests are mixed."""

import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import trio
from attrs import Factory, define

from tests.conftest import client_of, listening, running, wait_idle
from tests.cpu_backend import BY_TORCH
from tests.models.lora_adapters import vectors_by_peft, write_lora
from tests.models.model_families import TEXTS, edit_json, write_family
from tests.serving.changing_models import ADMIN
from trio_pool_serve.config import (
    Config,
    ModelChangesConfig,
    ModelConfig,
    NetworkConfig,
    ProcessesConfig,
    SchedulingConfig,
)
from trio_pool_serve.service import Service
from trio_pool_serve.types import Vectors

SHORT = tuple(text for text in TEXTS if text and len(text) < 60)
NAMES = ("base", "law", "art", "med")


@define(eq=False)
class Adapted:
    """A live server over ``base`` and its adapters."""

    service: Service
    client: httpx.AsyncClient
    folder: Path
    expected: Mapping[str, list[Vectors]]
    statuses: Counter[tuple[str, int]] = Factory(Counter)

    async def embed(self, name: str, text: int = 0) -> int:
        """Ask for a text's vector, which must be the expected one if there is one; return the status."""
        answer = await self.client.post("/v1/embeddings", json={"model": name, "input": SHORT[text]}, headers=ADMIN)
        self.statuses[name, answer.status_code] += 1
        if answer.status_code == 200:
            assert answer.json()["model"] == name
            np.testing.assert_allclose(answer.json()["data"][0]["embedding"], self.expected[name][text], atol=1e-5)
        return answer.status_code

    async def change(self, change: str, name: str) -> int:
        body = {"lora_name": name, "lora_path": str(self.folder / name)}
        return (await self.client.post(f"/v1/{change}_lora_adapter", json=body, headers=ADMIN)).status_code


@asynccontextmanager
async def adapted(folder: Path, *at_start: str, **processes: object) -> AsyncIterator[Adapted]:
    base = write_family(folder / "base", "bert")
    adapters = {name: write_lora(folder / name, base, seed) for seed, name in enumerate(NAMES[1:])}
    expected = {name: vectors_by_peft(base, adapters.get(name), SHORT) for name in NAMES}
    for one, other in itertools.combinations(NAMES, 2):
        assert np.abs(expected[one][0] - expected[other][0]).max() > 0.01
    config = Config(
        models=(f"base={base}",),
        loading=ModelConfig(
            device="cpu", dtype="float32", adapter=tuple(f"{name}={folder / name}" for name in at_start), **BY_TORCH
        ),
        network=NetworkConfig(api_key="admin-key"),
        processes=ProcessesConfig(**processes),
        scheduling=SchedulingConfig(result_cache_bytes=0, max_queue_s=600),
        model_changes=ModelChangesConfig(model_api=not processes),
    )
    service = Service(config)
    async with running(service), listening(service) as url, client_of(url) as client:
        yield Adapted(service, client, folder, expected)
        if not processes:
            await wait_idle(service)


async def ask_all(live: Adapted, rounds: int) -> None:
    """Ask for each text of each name several times, all at once and mixed."""
    wanted = [*itertools.product(NAMES, range(len(SHORT)))] * rounds
    random.Random(1).shuffle(wanted)
    async with trio.open_nursery() as nursery:
        for name, text in wanted:
            nursery.start_soon(live.embed, name, text)
    assert live.statuses == {(name, 200): rounds * len(SHORT) for name in NAMES}


async def test_mixed_requests_of_concurrent_clients_are_each_computed_with_their_adapter(tmp_path: Path):
    async with adapted(tmp_path, "law", "art", "med") as live:
        await ask_all(live, rounds=8)
        statistics = live.service.served["base"].engine.statistics()
        assert statistics.failed_batches == 0


@pytest.mark.slow
async def test_an_engine_process_computes_with_adapters(tmp_path: Path):
    async with adapted(tmp_path, "law", "art", "med", engine="process", replicas=1) as live:
        await ask_all(live, rounds=2)
        edit_json(tmp_path / "law" / "adapter_config.json", lambda config: config.update(lora_alpha=9))
        assert await live.embed("law") == 200, "it is in memory"


async def test_adapters_come_and_go_while_others_are_asked_for(tmp_path: Path):
    async with adapted(tmp_path, "law") as live, trio.open_nursery() as nursery:
        done = trio.Event()

        async def ask(name: str) -> None:
            for text in itertools.cycle(range(len(SHORT))):
                if done.is_set():
                    return
                await live.embed(name, text)

        for name in NAMES:
            nursery.start_soon(ask, name)
        for _ in range(6):
            for name in ("art", "med"):
                assert await live.change("load", name) == 200
                assert await live.embed(name) == 200
            for name in ("art", "med"):
                assert await live.change("unload", name) == 200
                assert await live.embed(name) == 404
        done.set()
    statuses = {name: {status for each, status in live.statuses if each == name} for name in NAMES}
    assert statuses["base"] == statuses["law"] == {200}
    assert statuses["art"] | statuses["med"] <= {200, 404, 503}, "503 while it is checked"


async def test_files_that_have_changed_fail_the_rows_of_their_adapter_until_it_is_loaded_again(tmp_path: Path):
    async with adapted(tmp_path, "law", "art") as live:
        loaded = live.service.served["base"].engine.devices.device.runner.runner
        write_lora(tmp_path / "law", tmp_path / "base", seed=2)
        loaded.adapters.store.loaded._values.clear()
        assert [await live.embed(name) for name in ("law", "art", "base")] == [500, 200, 200]
        assert live.service.state == "ready"
        live.expected["law"][:] = live.expected["med"]
        body = {"lora_name": "law", "lora_path": str(tmp_path / "law"), "load_inplace": True}
        assert (await live.client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)).status_code == 200
        assert await live.embed("law") == 200
