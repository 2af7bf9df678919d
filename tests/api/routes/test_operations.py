import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import get_args

import attrs
import httpx
import numpy as np
import pytest
import trio
from attrs import evolve

import trio_pool_serve
from tests.api.serving import serving, until_launching
from tests.conftest import client_of, listening, until
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.config import ThreadsConfig, computing_config
from trio_pool_serve.errors import EngineDeadError, RunnerDeadError
from trio_pool_serve.service import Service, ServiceState
from trio_pool_serve.telemetry.metrics import FAULTS
from trio_pool_serve.types import CopiedBatch, PoolingRequest, RenderedPrompt

LIVENESS = [("GET", "/livez")]
READINESS = [("GET", "/readyz")]
HEALTH = [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/health/")]

PROBES = {
    "loading": (200, 503, 503),
    "ready": (200, 200, 200),
    "stalled": (200, 503, 200),
    "overloaded": (200, 503, 200),
    "draining": (200, 503, 200),
    "dead": (503, 503, 503),
}
"""Statuses of liveness, readiness and health by the state of the service: the table of docs/run.md."""


async def assert_probes(client: httpx.AsyncClient, state: ServiceState) -> None:
    for probes, status in zip((LIVENESS, READINESS, HEALTH), PROBES[state], strict=True):
        for method, path in probes:
            answer = await client.request(method, path)
            assert answer.status_code == status, (state, method, path)
            told = "alive" if probes is LIVENESS and state != "dead" else state
            assert answer.json()["status"] == told, (state, method, path)
            assert ("reason" in answer.json()) == (state == "stalled" and probes is READINESS)
            if method == "GET":
                head = await client.head(path)
                assert (head.status_code, head.content) == (status, b""), (state, path)

    live, _, healthy = PROBES[state]
    root = await client.get("/")
    assert (root.status_code, root.text) == (healthy, "Ollama is running" if healthy == 200 else state)
    for name, status in (("live", live), ("ready", healthy)):
        of_nim = await client.get(f"/v1/health/{name}")
        assert (of_nim.status_code, of_nim.json()[name]) == (status, status == 200), (state, name)
        of_weaviate = await client.get(f"/.well-known/{name}")
        assert (of_weaviate.status_code, of_weaviate.content) == (204 if status == 200 else 503, b"")
        of_kserve = await client.get(f"/v2/health/{name}")
        assert (of_kserve.status_code, of_kserve.json()) == (status, {name: status == 200})


def test_probes_are_told_for_every_state():
    assert set(PROBES) == set(get_args(ServiceState))


async def test_while_the_model_loads_the_server_lives_and_is_not_ready(config, scripted):
    loaded = threading.Event()

    def load(*_):
        loaded.wait()
        return scripted

    service = Service(config, load)
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        async with listening(service) as url, client_of(url) as client:
            await assert_probes(client, "loading")
            answer = await client.post("/v1/embeddings", json={"input": "hello"})
            assert answer.status_code == 503
            assert answer.json()["error"]["type"] == "ServiceUnavailableError"
            assert int(answer.headers["retry-after"]) >= 1
            assert (await client.get("/v1/models")).status_code == 503
            for path in ("/api/show", "/api/pull"):
                assert (await client.post(path, json={"model": config.models[0]})).status_code == 503, path
            loaded.set()
            await service.wait_ready()
            await assert_probes(client, "ready")
        nursery.cancel_scope.cancel()


async def test_liveness_does_not_wait_behind_compute(client, scripted, service):
    scripted.gate.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: client.post("/v1/embeddings", json={"input": ["hello"] * 100}))
        await until_launching(scripted)
        for path in ("/livez", "/readyz", "/health", "/ping", "/", "/load", "/metrics"):
            assert (await client.get(path)).status_code == 200
        assert service.models.find().engine.statistics().in_flight_batches == 1
        scripted.gate.set()


async def test_a_dead_engine_shows_in_every_probe(config, scripted):
    def die(batch):
        raise RunnerDeadError("lost")

    scripted.on_launch = die
    service = Service(config, lambda *_: scripted)
    with pytest.RaisesGroup(EngineDeadError, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await nursery.start(service.run)
            await service.wait_ready()
            with trio.CancelScope(shield=True):
                async with listening(service) as url, client_of(url) as client:
                    answer = await client.post("/v1/embeddings", json={"input": "hello"})
                    assert answer.status_code == 503
                    assert "retry-after" in answer.headers
                    await assert_probes(client, "dead")


async def test_a_server_that_would_refuse_requests_is_not_ready_and_a_draining_one_takes_no_new_work(
    client, service, monkeypatch
):
    monkeypatch.setattr(type(service.models.find().engine.queue.admission), "is_full", lambda *_: True)
    await assert_probes(client, "overloaded")
    service.draining = True
    await assert_probes(client, "draining")
    answer = await client.post("/v1/embeddings", json={"input": "hello"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "5"


async def test_a_server_whose_engines_are_all_shared_with_others_stays_ready_while_it_refuses_requests(
    service, monkeypatch
):
    """Else a load balancer would take all such servers away at once, and clients would not be told 429."""
    monkeypatch.setattr(type(service.models.find().engine.queue.admission), "is_full", lambda *_: True)
    processes = attrs.evolve(service.config.processes, engine="hosts")
    monkeypatch.setattr(service, "config", attrs.evolve(service.config, processes=processes))
    async with listening(service) as url, client_of(url) as client:
        for path in ("/readyz", "/readyz?deep=true"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()) == (200, {"status": "overloaded"})
        service.draining = True
        assert (await client.get("/readyz")).status_code == 503


# -- devices that stall ----------------------------------------------------------------------------------

PROBE = PoolingRequest(RenderedPrompt(np.array([5, 6], dtype=np.int32)))


@asynccontextmanager
async def wedged(service: Service, scripted: ScriptedRunner) -> AsyncIterator[None]:
    """A batch is in flight and does not come back until the block is left."""
    scripted.gate.clear()
    scripted.launching.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.models.find().engine.submit, PROBE)
        await until_launching(scripted)
        yield
        scripted.gate.set()


async def test_a_batch_that_does_not_come_back_shows_in_readiness_and_not_in_liveness(config, scripted, monkeypatch):
    monkeypatch.setattr(computing_config, "STALL_SHARE", 1e-4)
    async with serving(config, scripted) as (service, client):
        await assert_probes(client, "ready")
        async with wedged(service, scripted):
            await until(lambda: service.state == "stalled")
            await assert_probes(client, "stalled")
            assert "in flight" in (await client.get("/readyz")).json()["reason"]
            assert (await client.get("/readyz?deep=true")).json()["status"] == "stalled"
            assert (await client.get("/load")).json()["models"][config.models[0]]["state"] == "stalled"
        await assert_probes(client, "ready")


@pytest.fixture
def probed(service: Service) -> Service:
    """A service whose device has a row to probe it by, as loaded runners have."""
    devices = service.models.find().engine.devices
    devices._facts = evolve(devices.facts, probe_request=PROBE)
    return service


@pytest.mark.parametrize(
    ("path", "computes"),
    [
        *((f"/readyz?{query}", True) for query in ("deep", "deep=1", "deep=true")),
        *((path, False) for path in ("/readyz", "/readyz?deep=false", "/readyz?deeper=1", "/livez?deep=1")),
    ],
)
async def test_a_deep_probe_computes_one_row_and_others_none(client, probed, scripted, path, computes):
    assert (await client.get(path)).status_code == 200
    assert [batch.requests for batch in scripted.batches] == [(PROBE,)] * computes


async def test_many_deep_probes_share_one_row_also_if_the_first_client_leaves(url, probed, scripted):
    statuses: list[int] = []

    async def probe() -> None:
        async with client_of(url) as client:
            statuses.append((await client.get("/readyz?deep=true")).status_code)

    scripted.gate.clear()
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as leaving:
            leaving.start_soon(probe)
            await until_launching(scripted)
            leaving.cancel_scope.cancel()
        for _ in range(10):
            nursery.start_soon(probe)
        scripted.gate.set()
    await probe()
    assert statuses == [200] * 11
    assert scripted.rows == [1]


async def test_a_deep_probe_fails_while_the_device_is_wedged_and_its_row_leaves_the_queue(client, probed, scripted):
    probed.models.find().probe.timeout_s = 0.05
    async with wedged(probed, scripted):
        for _ in range(3):
            answer = await client.get("/readyz?deep=true")
            assert (answer.status_code, answer.json()["status"]) == (503, "failing")
            assert "not computed within" in answer.json()["reason"]
            for path in ("/livez", "/readyz", "/health"):
                assert (await client.get(path)).status_code == 200
        assert probed.models.find().engine.statistics().queued_rows == 0


def fail(batch):
    raise ValueError("broken")


def not_finite(batch):
    return CopiedBatch([(np.array([np.nan], dtype=np.float32),)])


@pytest.mark.parametrize("on_launch", [fail, not_finite])
async def test_a_deep_probe_tells_that_rows_fail_or_that_numbers_are_not_finite(client, probed, scripted, on_launch):
    scripted.on_launch = on_launch
    answer = await client.get("/readyz?deep=true")
    assert (answer.status_code, answer.json()["status"]) == (503, "failing")
    assert on_launch is fail or "not finite" in answer.json()["reason"]
    assert "broken" not in answer.text


def samples(text: str) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#"]
    return {name.removeprefix("trio_pool_serve_"): float(value) for name, value in lines}


async def test_every_metric_is_there_before_the_first_request_and_counts_what_happens(client, config):
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found, of_model = samples(answer.text), f'model="{config.models[0]}"'
    for stage in ("render_wait", "render", "encode", "request", "loop_lag"):
        assert f'{stage}_seconds_bucket{{le="0.00025"}}' in found, stage
        assert stage == "loop_lag" or found[f"{stage}_seconds_count"] == 0, stage
    sizes = ("batch_rows", "batch_tokens", "padding_waste")
    for name in ("queue_seconds", "forward_seconds", "copy_wait_seconds", *sizes):
        assert found[f"{name}_count{{{of_model}}}"] == 0, name
    for of in FAULTS:
        assert found[f'faults_total{{{of_model},of="{of}"}}'] == 0
    assert found[f"busy_seconds_total{{{of_model}}}"] >= 0
    assert found["requests_total"] == 0
    for kind in ("render", "postprocess", "launch", "copy"):
        assert found[f'limiter_capacity{{of="{kind}"}}'] >= 1
    assert found[f'engine{{{of_model},of="ready"}}'] == 1
    await client.post("/v1/embeddings", json={"input": ["hello world", "hello"]})
    await client.post("/v1/embeddings", json={"input": []})
    found = samples((await client.get("/metrics")).text)
    for stage in ("render_wait", "render", "encode", "request"):
        assert found[f"{stage}_seconds_count"] == 1, stage
    assert found[f"queue_seconds_count{{{of_model}}}"] == 2
    assert found[f"batch_tokens_sum{{{of_model}}}"] >= 7
    assert (found["requests_total"], found["request_failures_total"]) == (2, 1)
    assert found['tasks{of="living"}'] >= 10, "of the listener, the service and this request"


async def test_load_tells_engines_and_limiters_and_counts_running_requests_for_tasks(client, config, scripted, service):
    load = (await client.get("/load")).json()
    assert (load["models"][config.models[0]]["state"], load["server_load"]) == ("ready", 0)
    assert load["limiters"]["render"] == {"capacity": 2, "borrowed": 0, "waiting": 0}
    scripted.gate.clear()
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(lambda: client.post("/v1/embeddings", json={"input": "hello"}))
        await until(lambda: service.running_tasks >= 3)
        assert (await client.get("/load")).json()["server_load"] == 3
        scripted.gate.set()
    assert (await client.post("/v1/embeddings", json={"input": 5.5})).status_code == 400
    assert (await client.post("/v1/embeddings", json={"input": "a"}, headers={"x-request-timeout": "0"})).is_error
    assert (await client.get("/load")).json()["server_load"] == 0


async def test_processes_that_render_templates_and_the_version_are_told(config, scripted):
    config = attrs.evolve(config, threads=ThreadsConfig(renderer_num_workers=3))
    async with serving(config, scripted) as (_service, client):
        idle = {"capacity": 3, "borrowed": 0, "waiting": 0, "killed": 0}
        assert (await client.get("/load")).json()["workers"] == {"template": idle}
        found = samples((await client.get("/metrics")).text)
        for name, value in idle.items():
            assert found[f'worker_{name}{{of="template"}}'] == value
        assert (await client.get("/version")).json() == {"version": trio_pool_serve.__version__}
