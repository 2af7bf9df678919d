"""Models that are loaded and unloaded while the server runs: who waits for what, and what others notice of it."""

import gc
import os
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import attrs
import httpx
import pytest
import trio

from tests.conftest import full_queue, running, wait_idle
from tests.model_folders import write_scripted_folder
from tests.rendering.chat.chat_folders import CHATML, write_chat_folder
from tests.scripted_runner import ScriptedRunner
from tests.server.server_process import until
from tests.serving.changing_models import ADMIN, Changing, Loader, changing
from trio_pool_serve.config import Config, ModelChangesConfig
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.errors import EngineLoadingError, ModelLoadError, NotFoundError, RunnerDeadError
from trio_pool_serve.models.loading import runner_loader
from trio_pool_serve.processes.worker_processes import WorkerProcesses
from trio_pool_serve.prompts import ChatMessage, ChatPrompt, RenderingParams, TextPart
from trio_pool_serve.service import Service
from trio_pool_serve.serving import served_models
from trio_pool_serve.types import Batch


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[Changing]:
    async with changing(tmp_path) as live:
        yield live


# -- several models: each has its own queue, all share the threads ------------------------------------


async def test_requests_choose_by_name_the_first_is_the_default_and_an_unknown_name_is_404(tmp_path):
    async with changing(tmp_path, at_start=("a", "b")) as live:
        for name in ("a", "b", None):
            assert (await live.embed(name)).json()["model"] == (name or "a")
        load = (await live.client.get("/load", headers=ADMIN)).json()["models"]
        assert (load["a"]["batches"], load["b"]["batches"]) == (2, 1)
        assert await live.metric('trio_pool_serve_queue_seconds_count{model="b"}') == 1.0
        assert await live.metric('trio_pool_serve_engine{model="b",of="ready"}') == 1.0
        unknown = await live.embed("c")
        assert unknown.status_code == 404
        assert "The model `c` does not exist. This server has: a, b." in unknown.json()["error"]["message"]
        cards = {card["id"]: card for card in (await live.client.get("/v1/models", headers=ADMIN)).json()["data"]}
        assert {name: card["max_model_len"] for name, card in cards.items()} == {"a": 64, "b": 16}
        with full_queue(live.service):
            assert [(await live.embed(name)).status_code for name in ("a", "b")] == [429, 200]


async def test_they_take_turns_on_the_thread_that_computes(tmp_path):
    """One device, one thread: while one model's batch is launched, the other's waits, and then has its turn."""
    async with changing(tmp_path, at_start=("a", "b"), replicas=1) as live:
        (other,) = live.loader.runners["b"]
        async with live.in_use("a"):
            await trio.to_thread.run_sync(live.loader.runners["a"][0].launching.wait)
            async with live.asking(live.embed, "b"):
                await until(lambda: live.service.served["b"].engine.statistics().in_flight_batches)
                assert other.batches == []
                live.loader.runners["a"][0].gate.set()
        assert len(other.batches) == 1


async def test_no_request_is_answered_and_nothing_changed_before_all_are_loaded(tmp_path):
    """Loading keeps the thread that computes: a request would wait for minutes."""
    loader = Loader(held={"b"})
    models = tuple(f"{name}={write_scripted_folder(tmp_path / name)}" for name in "ab")
    service = Service(Config(models=models), loader.load)
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        await loader.wait_entered()
        assert service.state == "loading"
        with pytest.raises(EngineLoadingError):
            service.model("a")
        with pytest.raises(NotFoundError):
            service.model("c")
        with pytest.raises(EngineLoadingError):
            await service.models.add(service.models.find().source)
        with pytest.raises(EngineLoadingError):
            await service.models.remove(service.models.find(), drains=False)
        loader.gate.set()
        await service.wait_ready()
        assert service.model("a").name == "a"
        nursery.cancel_scope.cancel()


# -- changes -------------------------------------------------------------------------------------------


async def test_a_model_is_loaded_computes_and_is_unloaded(live):
    assert (await live.embed("bb")).status_code == 404
    card = (await live.load("b")).json()
    assert (card["id"], card["state"], card["max_model_len"], card["task"]) == ("b", "loaded", 16, "embed")
    answer = (await live.embed("b")).json()
    assert (answer["model"], len(answer["data"][0]["embedding"])) == ("b", 5)
    assert await live.states() == {"a": "loaded", "b": "loaded"}
    assert (await live.unload("b")).json() == {"id": "b", "deleted": True, "object": "model"}
    gone = await live.embed("b")
    assert (gone.status_code, "This server has: a." in gone.text) == (404, True)
    assert await live.states() == {"a": "loaded"}
    assert (await live.embed()).json()["model"] == "a"
    assert live.loader.loads == {"a": 1, "b": 1}


async def test_further_names_select_the_same_model_and_are_all_taken(live):
    assert (await live.load("b", aliases=["bee", "beta"])).status_code == 200
    assert (await live.embed("beta")).json()["model"] == "b"
    for taken in ({"name": "bee"}, {"name": "a"}, {"name": "c", "aliases": ["b"]}):
        answer = await live.load("c", **taken)
        assert (answer.status_code, answer.json()["error"]["type"]) == (409, "ConflictError")
    assert (await live.unload("bee")).json()["id"] == "b"
    assert (await live.states()) == {"a": "loaded"}


async def test_nothing_refers_to_a_model_that_has_been_unloaded_and_a_thread_has_freed_its_runner(live):
    await live.load("b")
    await live.embed("b")
    threads: list[threading.Thread] = []
    weakref.finalize(live.loader.runners.pop("b")[0], lambda: threads.append(threading.current_thread()))
    served, renderer = weakref.ref(live.service.served["b"]), weakref.ref(live.service.model("b").renderer)
    await live.unload("b")
    gc.collect()
    assert [thread.name for thread in threads] == ["load"]
    assert renderer() is None
    await live.embed()
    gc.collect()
    assert served() is None
    assert 'model="b"' not in (await live.client.get("/metrics", headers=ADMIN)).text


async def test_a_model_that_is_not_at_the_start_is_loaded_beside_batches_of_others(tmp_path):
    """The thread that loads is not one of those that compute."""
    async with changing(tmp_path) as live, live.loading("b"):
        for name in ("a", None) * 3:
            assert (await live.embed(name)).status_code == 200
        assert await live.states() == {"a": "loaded", "b": "loading"}
        assert (await live.client.get("/readyz")).status_code == 200
        assert (await live.embed("b")).status_code == 503  # it may not be loadable at all
    assert len(live.loader.runners["a"][0].batches) == 6


async def test_a_model_that_cannot_be_loaded_is_refused_with_the_reason_and_leaves_nothing(tmp_path):
    async with changing(tmp_path, loader=Loader(broken={"b"})) as live:
        broken = await live.load("b")
        assert (broken.status_code, broken.json()["error"]["param"]) == (400, "model")
        assert "b is broken" in broken.json()["error"]["message"]
        (tmp_path / "e").mkdir()
        assert "e" in (await live.load("e")).json()["error"]["message"]
        assert (
            await live.client.post("/v1/models", json={"model": "no such/model/"}, headers=ADMIN)
        ).status_code == 400
        assert await live.states() == {"a": "loaded"}
        assert (await live.embed("a")).status_code == 200
        assert await live.metric('trio_pool_serve_model_changes_total{of="failed_loads"}') == 3.0
        live.loader.broken.clear()
        assert (await live.load("b")).status_code == 200


async def test_a_client_that_leaves_while_its_model_is_loaded_changes_nothing(tmp_path):
    loader = Loader(held={"b"})
    async with changing(tmp_path, loader=loader) as live:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(live.load, "b")
            await loader.wait_entered()
            nursery.cancel_scope.cancel()
        await live.wait_state("b", "loading")
        assert (await live.load("b")).status_code == 409
        loader.gate.set()
        await live.wait_state("b", "loaded")
        assert (await live.embed("b")).status_code == 200
    assert loader.loads["b"] == 1


async def test_cancelling_those_who_add_and_remove_leaves_the_change_to_itself(live):
    models = live.service.models
    async with live.loading("b"):
        served = models.by_name["b"]
        with trio.move_on_after(0.01) as scope:
            await models.remove(served, drains=False)
        assert scope.cancelled_caught  # the thread that loads is still busy
        assert "b" not in models.by_name
    with trio.fail_after(30):
        await served.ended.wait()
    with trio.CancelScope() as scope:
        scope.cancel()
        await models.loaded(models.use("a"))
        await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    await wait_idle(live.service)


async def test_deleting_a_model_that_is_being_loaded_stops_that(live):
    async with trio.open_nursery() as nursery:
        async with live.loading("b") as answers:
            nursery.start_soon(live.unload, "b")
            await live.wait_state("b", None)
        assert (answers[0].status_code, "before it was loaded" in answers[0].text) == (409, True)
        live.loader.held.clear()
        assert (await live.load("b")).status_code == 200  # its name is free


@pytest.mark.parametrize("is_loaded_again", [False, True])
async def test_deleting_a_model_whose_load_is_failing_leaves_others_alone(tmp_path, monkeypatch, is_loaded_again):
    """Between its error and the end of its tasks, which takes a while here, its name may be freed and taken again."""
    loader = Loader(broken={"b"})
    is_failing, may_end = trio.Event(), trio.Event()

    run = Engine.run

    async def end_late(engine: Engine, **options: trio.TaskStatus) -> None:
        try:
            await run(engine, **options)
        finally:
            with trio.CancelScope(shield=True):
                is_failing.set()
                await may_end.wait()

    async with changing(tmp_path, loader=loader) as live:
        monkeypatch.setattr(Engine, "run", end_late)
        again: list[httpx.Response] = []
        async with trio.open_nursery() as nursery, live.asking(live.load, "b") as failed:
            with trio.fail_after(30):
                await is_failing.wait()
            nursery.start_soon(live.unload, "b")
            await live.wait_state("b", None)
            loader.broken.clear()
            async with AsyncExitStack() as stack:
                if is_loaded_again:
                    again = await stack.enter_async_context(live.asking(live.load, "b"))
                    await live.wait_state("b", "loading")
                may_end.set()
        assert [answer.status_code for answer in (*failed, *again)] == ([400, 200] if is_loaded_again else [400])
        assert "b is broken" in failed[0].text
        assert await live.states() == ({"a": "loaded", "b": "loaded"} if is_loaded_again else {"a": "loaded"})
        assert (await live.embed("b")).status_code == (200 if is_loaded_again else 404)
        assert (await live.embed("a")).status_code == 200


async def test_an_error_while_a_model_is_unloaded_does_not_keep_it_from_being_loaded_again(tmp_path, monkeypatch):
    errors = [RuntimeError("late")]

    run = Engine.run

    async def fail_at_the_end(engine: Engine, **options: trio.TaskStatus) -> None:
        try:
            await run(engine, **options)
        finally:
            if errors:
                raise errors.pop()

    async with changing(tmp_path, at_start=("a", "b"), max_loaded_models=1) as live:
        monkeypatch.setattr(Engine, "run", fail_at_the_end)
        for name in ("b", "a", "b"):
            assert (await live.embed(name)).status_code == 200
        assert errors == []
        assert await live.metric('trio_pool_serve_model_changes_total{of="failed_loads"}') == 0.0
        assert await live.metric('trio_pool_serve_model_changes_total{of="unloads"}') == 3.0


async def test_another_model_is_the_default_while_the_first_one_drains(live):
    async with trio.open_nursery() as nursery:
        await live.load("b")
        async with live.in_use("a"):
            nursery.start_soon(live.unload, "a", "?drain=1")
            await live.wait_state("a", "draining")
            answer = await live.embed()
            assert (answer.status_code, answer.json()["model"]) == (200, "b")
            assert (await live.client.get("/info", headers=ADMIN)).json()["served_model_name"] == "b"
            assert [(await live.embed(name)).status_code for name in ("a", "c")] == [404, 404]
            assert (await live.unload("b")).status_code == 200
            refused = await live.embed()
            assert (refused.status_code, "`a` is being unloaded" in refused.text) == (404, True)


async def test_one_model_may_take_unknown_names(live):
    assert (await live.load("b", name="*")).status_code == 400
    assert (await live.load("b", aliases=["*"])).status_code == 200
    assert [(await live.embed(name)).json()["model"] for name in ("x", "a", None)] == ["b", "a", "a"]
    assert (await live.load("c", aliases=["*"])).status_code == 409
    assert (await live.unload("*")).status_code == 404
    assert (await live.unload("b")).status_code == 200
    assert (await live.embed("x")).status_code == 404


async def test_a_model_in_use_is_not_unloaded_unless_it_drains(live):
    await live.load("b")
    async with live.in_use("b") as answers:
        busy = await live.unload("b")
        assert (busy.status_code, "1 requests use the model `b`" in busy.text) == (409, True)
        async with live.asking(live.unload, "b", "?drain=1") as drained:
            await live.wait_state("b", "draining")
            refused = await live.embed("b")
            assert (refused.status_code, "is being unloaded" in refused.text) == (404, True)
            assert (await live.embed("a")).status_code == 200
            assert answers == drained == []
            live.loader.runners["b"][0].gate.set()
    assert (answers[0].status_code, drained[0].status_code) == (200, 200)
    assert await live.states() == {"a": "loaded"}


async def test_a_drain_ends_after_its_time_limit_and_the_requests_that_are_left_fail(tmp_path):
    async with changing(tmp_path, drain_timeout_s=0.05) as live:
        await live.load("b")
        async with live.in_use("b") as answers:
            assert (await live.unload("b", "?drain=true")).status_code == 200
        assert answers[0].status_code == 503
        assert (await live.embed("a")).status_code == 200


async def test_a_stream_uses_its_model_until_it_has_been_sent(live):
    await live.load("b")
    (runner,) = live.loader.runners["b"]
    runner.gate.clear()
    body = {"input": ["hello", "world"], "model": "b", "stream": True}
    async with live.client.stream("POST", "/v1/embeddings", json=body, headers=ADMIN) as stream:
        assert stream.status_code == 200
        assert (await live.unload("b")).status_code == 409
        runner.gate.set()
        events = [line async for line in stream.aiter_lines() if line]
    assert events[-1] == "data: [DONE]"
    with trio.fail_after(30):
        while (await live.unload("b")).status_code != 200:  # noqa: ASYNC110
            await trio.sleep(0.005)


async def test_an_idle_model_is_unloaded_and_loaded_again_by_its_next_request(tmp_path):
    async with changing(tmp_path, at_start=("a", "b"), idle_unload_s=0.05) as live:
        await live.wait_state("a", "unloaded")
        await live.wait_state("b", "unloaded")
        assert (await live.client.get("/readyz")).status_code == 200
        card = (await live.client.get("/v1/models/b", headers=ADMIN)).json()
        assert (card["max_model_len"], card["task"]) == (16, "embed")
        assert "memory_bytes" not in card
        assert (await live.client.get("/load", headers=ADMIN)).json()["models"]["b"]["state"] == "unloaded"
        answer = await live.embed("b")
        assert (answer.status_code, len(answer.json()["data"][0]["embedding"])) == (200, 5)
        assert live.loader.loads == {"a": 1, "b": 2}


@pytest.mark.slow
async def test_requests_that_find_a_model_unloaded_load_it_once_and_do_not_delay_others(tmp_path):
    loader = Loader()
    async with changing(tmp_path, at_start=("a", "b"), max_loaded_models=2, idle_unload_s=0.05, loader=loader) as live:
        await live.wait_state("b", "unloaded")
        loader.held.add("b")
        answers: list[int] = []

        async def embed() -> None:
            answers.append((await live.embed("b")).status_code)

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(embed)
            await loader.wait_entered()
            await until(lambda: live.service.served["b"].users == 4)
            assert (await live.client.get("/v1/models/b", headers=ADMIN)).json()["state"] == "loading"
            # It would be loaded by the same thread if that were not held; so one that is loaded already.
            assert answers == []
            loader.gate.set()
        assert answers == [200] * 4
    assert loader.loads["b"] == 2


@pytest.mark.slow
async def test_the_invocations_of_an_unloaded_model_load_it(tmp_path):
    async with changing(tmp_path, idle_unload_s=0.05) as live:
        await live.wait_state("a", "unloaded")
        answer = await live.client.post("/invocations", json={"input": "hello"}, headers=ADMIN)
        assert (answer.status_code, answer.json()["model"]) == (200, "a")
        await live.wait_state("a", "unloaded")
        assert (await live.client.get("/info", headers=ADMIN)).json()["max_input_length"] == 64


@pytest.mark.slow
async def test_the_model_that_was_used_longest_ago_makes_room_for_another(tmp_path):
    async with changing(tmp_path, at_start=("a", "b", "c"), max_loaded_models=2) as live:
        assert await live.states() == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        await live.embed("a")
        assert (await live.embed("c")).status_code == 200
        assert await live.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        assert (await live.load("d")).status_code == 200
        assert await live.states() == {"a": "unloaded", "b": "unloaded", "c": "loaded", "d": "loaded"}
        for name in ("a", "b", "c", "d"):
            assert (await live.embed(name)).json()["model"] == name
        assert await live.metric('trio_pool_serve_model_changes_total{of="loads"}') == 8.0
        assert await live.metric('trio_pool_serve_model_changes_total{of="unloads"}') == 6.0


async def test_without_room_a_request_is_told_when_to_come_again(tmp_path):
    async with changing(tmp_path, at_start=("a", "b"), max_loaded_models=1) as live:
        async with live.in_use("a"):
            for refused in (await live.embed("b"), await live.load("c")):
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
                assert "--max-loaded-models is 1, and all loaded models are in use" in refused.text
        assert await live.states() == {"a": "loaded", "b": "unloaded"}
        assert (await live.embed("b")).status_code == 200


async def test_no_more_models_than_allowed_are_in_memory_however_requests_come(tmp_path):
    async with changing(tmp_path, at_start=("a", "b", "c", "d"), max_loaded_models=2) as live:
        most = 0
        statuses: list[int] = []

        async def embed(name: str) -> None:
            for _ in range(10):
                answer = await live.embed(name)
                statuses.append(answer.status_code)

        async def watch() -> None:
            nonlocal most
            while True:
                engines = [served.engine for served in live.service.served.values()]
                most = max(most, sum(engine.devices.device is not None for engine in engines))
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as watching:
            watching.start_soon(watch)
            async with trio.open_nursery() as nursery:
                for name in "abcd":
                    nursery.start_soon(embed, name)
            watching.cancel_scope.cancel()
        assert set(statuses) <= {200, 503}
        assert statuses.count(200) > 0
        assert most <= 2


async def test_a_model_that_cannot_be_loaded_again_is_refused_without_its_path_and_tried_later(tmp_path, monkeypatch):
    async with changing(tmp_path, at_start=("a", "b"), max_loaded_models=1) as live:
        live.loader.broken.add("b")
        for _ in range(3):
            answer = await live.embed("b")
            assert (answer.status_code, str(tmp_path) in answer.text) == (503, False)
            assert "the server's log contains the reason" in answer.text
        assert live.loader.loads["b"] == 1  # further attempts wait
        live.loader.broken.clear()
        live.service.served["b"].retry_at = 0.0
        assert (await live.embed("b")).status_code == 200


async def test_an_engine_that_dies_after_its_model_was_loaded_ends_the_service(tmp_path):
    def die(batch: Batch) -> None:
        raise RunnerDeadError("lost")

    with pytest.RaisesGroup(pytest.RaisesExc(Exception, match="lost"), flatten_subgroups=True):
        async with changing(tmp_path) as live:
            await live.load("b")
            live.loader.runners["b"][0].on_launch = die
            assert (await live.embed("b")).status_code == 503
            await trio.sleep_forever()


@pytest.mark.parametrize("max_loaded_models", [None, 1])
async def test_nothing_is_loaded_when_the_files_of_one_of_the_models_are_wrong(tmp_path, max_loaded_models):
    """Not even if that one would be loaded later."""
    loader = Loader()
    write_scripted_folder(tmp_path / "a")
    (tmp_path / "e").mkdir()
    models = (f"a={tmp_path / 'a'}", f"e={tmp_path / 'e'}")
    config = Config(models=models, model_changes=ModelChangesConfig(max_loaded_models=max_loaded_models))
    with pytest.raises(ModelLoadError, match=r"^e cannot be loaded: .*config\.json"):
        await Service(config, loader.load).run()
    assert not loader.loads


@pytest.mark.parametrize("wrong", ["runner", "renderer"])
async def test_what_is_wrong_with_a_model_is_said_before_another_is_prepared(wrong, tmp_path):
    is_prepared = threading.Event()
    loader = Loader(held={"a"}, broken={"b"} if wrong == "runner" else set(), on_prepare=is_prepared.wait)
    models = tuple(f"{name}={write_scripted_folder(tmp_path / name)}" for name in "ab")
    if wrong == "renderer":
        (tmp_path / "b" / "tokenizer.json").write_text("{}")
    service = Service(Config(models=models), loader.load)

    async def load_a_once_all_wait() -> None:
        await until(lambda: service.offload.statistics()["load"].waiting >= 3)
        loader.gate.set()

    try:
        expected = pytest.RaisesExc(ModelLoadError, match=r"^b cannot be loaded: ")
        with trio.fail_after(30), pytest.RaisesGroup(expected, flatten_subgroups=True):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(load_a_once_all_wait)
                await service.run()
    finally:
        is_prepared.set()


async def test_nothing_refers_to_a_model_that_could_not_be_prepared(tmp_path, monkeypatch):
    """Not even a cycle of references, which the thread that failed may still hold when garbage is collected."""
    monkeypatch.setattr(runner_loader, "collect_garbage", lambda **_: None)

    def fail() -> None:
        raise ModelLoadError("too large")

    loader = Loader()
    async with changing(tmp_path, loader=loader) as live:
        loader.on_prepare = fail
        gc.disable()
        try:
            assert "too large" in (await live.load("b")).text
            gone = weakref.ref(loader.runners.pop("b")[0])
            await until(lambda: gone() is None)
        finally:
            gc.enable()


async def test_a_fifo_among_a_model_s_files_does_not_keep_later_models_from_loading(tmp_path):
    write_scripted_folder(tmp_path / "f")
    (tmp_path / "f/config.json").unlink()
    os.mkfifo(tmp_path / "f/config.json")
    async with changing(tmp_path) as live:
        with trio.fail_after(30):
            refused = await live.load("f")
            assert "config.json is neither a file nor a folder" in refused.text
            assert (await live.load("b")).status_code == 200


@pytest.mark.slow
async def test_all_models_can_be_unloaded_and_the_first_that_is_loaded_then_is_the_default(live):
    assert (await live.unload("a")).status_code == 200
    assert await live.states() == {}
    answer = await live.embed()
    assert (answer.status_code, "This server has: no model." in answer.text) == (404, True)
    assert (await live.client.get("/readyz")).status_code == 200
    await live.load("b")
    assert (await live.embed()).json()["model"] == "b"


async def test_the_number_of_models_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(served_models, "MAX_MODELS", 2)
    async with changing(tmp_path) as live:
        assert (await live.load("b")).status_code == 200
        assert (await live.load("c")).status_code == 403


async def test_a_process_for_chat_templates_waits_for_the_first_conversation_of_a_model_that_has_one(tmp_path):
    plain, chat = write_scripted_folder(tmp_path / "plain"), write_chat_folder(tmp_path / "chat", CHATML)
    config = Config(models=(str(plain),))
    async with running(Service(config, lambda *_: ScriptedRunner())) as service:
        processes = service.processes["template"]
        assert idle_processes(processes) == 0
        await service.models.add(attrs.evolve(config.sources[0], location=str(chat), name="chat"))
        assert idle_processes(processes) == 1
        prompt = ChatPrompt(messages=(ChatMessage("user", (TextPart("hello"),)),))
        assert len((await service.model("chat").renderer.render(prompt, RenderingParams())).token_ids) > 20
        assert idle_processes(processes) == 1


def idle_processes(processes: WorkerProcesses) -> int:
    return processes._context.statistics().idle_workers


async def test_a_model_is_loaded_although_no_process_for_its_chat_template_can_be_started(
    tmp_path, monkeypatch, caplog
):
    async def fail(*_: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(WorkerProcesses, "_run", fail)
    config = Config(models=(str(write_chat_folder(tmp_path / "chat", CHATML)),))
    async with running(Service(config, lambda *_: ScriptedRunner())) as service:
        assert service.state == "ready"
    assert "cannot start another process" in caplog.text
