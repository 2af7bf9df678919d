"""Several models in one server: each has its own queue, all share the threads."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
import trio
from attrs import define, field

from tests.conftest import client_of, full_queue, listening, running
from tests.model_folders import write_scripted_folder
from tests.scripted_runner import ScriptedRunner
from tests.server.server_process import until
from trio_pool_serve.config import Config, ProcessesConfig
from trio_pool_serve.errors import EngineDeadError, EngineLoadingError, ModelLoadError, NotFoundError, RunnerDeadError
from trio_pool_serve.service import Service
from trio_pool_serve.types import Batch

pytestmark = pytest.mark.unit


@define(eq=False)
class TwoModels:
    """A service with models ``a`` and ``b``, whose runners can be told apart."""

    service: Service
    a: ScriptedRunner
    b: ScriptedRunner
    client: httpx.AsyncClient

    async def embed(self, model: str | None = None, **more) -> httpx.Response:
        body = {"input": "hello", **more} if model is None else {"input": "hello", "model": model, **more}
        return await self.client.post("/v1/embeddings", json=body)

    def statistics(self, name: str):
        return self.service.served[name].engine.statistics()


@define(eq=False)
class Runners:
    """Loads ``a`` first, then ``b``; waits with each for its gate."""

    a: ScriptedRunner = field(factory=lambda: ScriptedRunner(dimensions=8))
    b: ScriptedRunner = field(factory=lambda: ScriptedRunner(dimensions=5))
    before_b: Callable[[], None] = lambda: None

    def load(self, folder, *_) -> ScriptedRunner:
        if folder.path.name == "a":
            return self.a
        self.before_b()
        return self.b


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    write_scripted_folder(tmp_path / "a")
    write_scripted_folder(tmp_path / "b", max_length=16)
    return f"a={tmp_path / 'a'}", f"b={tmp_path / 'b'}"


@pytest.fixture
async def two(folders) -> AsyncIterator[TwoModels]:
    runners = Runners()
    async with (
        running(Service(Config(models=folders, processes=ProcessesConfig(replicas=1)), runners.load)) as service,
        listening(service) as url,
        client_of(url) as client,
    ):
        await service.wait_ready()
        yield TwoModels(service, runners.a, runners.b, client)


async def test_requests_choose_by_name_the_first_is_the_default_and_an_unknown_name_is_404(two):
    for name, dimensions in (("a", 8), ("b", 5), (None, 8)):
        answer = (await two.embed(name)).json()
        assert answer["model"] == (name or "a")
        assert len(answer["data"][0]["embedding"]) == dimensions
    assert (len(two.a.batches), len(two.b.batches)) == (2, 1)
    unknown = await two.embed("c")
    assert unknown.status_code == 404
    assert "The model `c` does not exist. This server has: a, b." in unknown.json()["error"]["message"]


async def test_all_models_are_listed_with_their_own_limits(two):
    cards = {card["id"]: card for card in (await two.client.get("/v1/models")).json()["data"]}
    assert {name: card["max_model_len"] for name, card in cards.items()} == {"a": 64, "b": 16}
    assert (await two.client.get("/v1/models/b")).json() == cards["b"]


async def test_each_model_has_its_own_queue_limit(folders):
    async with (
        running(Service(Config(models=folders), Runners().load)) as service,
        listening(service) as url,
        client_of(url) as client,
    ):
        with full_queue(service):
            bodies = [{"input": "hello", "model": name} for name in ("a", "b")]
            full, free = [await client.post("/v1/embeddings", json=body) for body in bodies]
        assert (full.status_code, free.status_code) == (429, 200)


async def test_a_failing_batch_of_one_model_is_nothing_to_the_other(two):
    def fail(batch: Batch) -> None:
        raise ValueError("unlucky")

    two.a.on_launch = fail
    assert (await two.embed("a")).status_code == 500
    assert (await two.embed("b")).status_code == 200
    assert two.statistics("a").failed_batches == 1
    assert two.statistics("b").failed_batches == 0


async def test_they_take_turns_on_the_thread_that_computes(two):
    """One device, one thread: while one model's batch is launched, the other's waits, and then has its turn."""
    two.a.gate.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(two.embed, "a")
        await trio.to_thread.run_sync(two.a.launching.wait)
        nursery.start_soon(two.embed, "b")
        await until(lambda: two.statistics("b").in_flight_batches)
        assert two.b.batches == []
        two.a.gate.set()
    assert len(two.b.batches) == 1


async def test_load_and_metrics_tell_them_apart(two):
    await two.embed("b")
    load = (await two.client.get("/load")).json()["models"]
    assert (load["a"]["batches"], load["b"]["batches"]) == (0, 1)
    metrics = (await two.client.get("/metrics")).text
    assert 'trio_pool_serve_queue_seconds_count{model="a"} 0.0' in metrics
    assert 'trio_pool_serve_queue_seconds_count{model="b"} 1.0' in metrics
    assert 'trio_pool_serve_engine{model="b",of="ready"} 1.0' in metrics


async def test_no_request_is_answered_before_all_are_loaded(folders):
    """Loading keeps the thread that computes: a request would wait for minutes."""
    gate = trio.Event()
    token = trio.lowlevel.current_trio_token()
    entered = trio.Event()

    def before_b() -> None:
        trio.from_thread.run_sync(entered.set, trio_token=token)
        trio.from_thread.run(gate.wait, trio_token=token)

    service = Service(Config(models=folders), Runners(before_b=before_b).load)
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        await entered.wait()
        assert service.state == "loading"
        with pytest.raises(EngineLoadingError):
            service.model("a")
        gate.set()
        await service.wait_ready()
        assert service.model("a").name == "a"
        nursery.cancel_scope.cancel()


async def test_a_model_that_cannot_be_loaded_ends_the_service(folders):
    def before_b() -> None:
        raise ModelLoadError("b is broken")

    with pytest.raises(ModelLoadError, match="b is broken"):
        await Service(Config(models=folders), Runners(before_b=before_b).load).run()


async def test_a_dead_engine_ends_the_service(folders):
    runners = Runners()
    service = Service(Config(models=folders), runners.load)

    def die(batch: Batch) -> None:
        raise RunnerDeadError("lost")

    runners.b.on_launch = die
    failures: list[Exception] = []

    async def run() -> None:
        try:
            await service.run()
        except EngineDeadError as error:
            failures.append(error)

    async with trio.open_nursery() as nursery, listening(service) as url:
        nursery.start_soon(run)
        await service.wait_ready()
        async with client_of(url) as client:
            assert (await client.post("/v1/embeddings", json={"input": "hello", "model": "b"})).status_code == 503
            assert (await client.get("/health")).status_code == 503
    assert "lost" in str(failures[0])


def test_a_name_that_is_not_there_is_not_found_before_anything_is_loaded(folders):
    with pytest.raises(NotFoundError):
        Service(Config(models=folders)).model("c")
