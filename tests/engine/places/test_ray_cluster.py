"""Calls of Ray's API in threads, without a cluster."""

import threading

import trio

from trio_pool_serve.config import ProcessesConfig
from trio_pool_serve.engine.places import ray_cluster as module
from trio_pool_serve.engine.places.ray_cluster import CONTROL_CALLS, RayCluster


async def test_ends_that_ray_does_not_answer_leave_room_for_other_calls(monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.01)
    monkeypatch.setattr("ray.kill", lambda _: answers.wait())
    cluster = RayCluster(ProcessesConfig())
    try:
        for _ in range(2 * CONTROL_CALLS):
            await cluster.kill(None)
        with trio.fail_after(60):
            assert await cluster.in_thread(lambda: "called") == "called"
    finally:
        answers.set()


async def test_an_end_that_fails_is_logged_and_raises_nothing(monkeypatch, caplog):
    def fail(_: object) -> None:
        raise ValueError("no such actor")

    monkeypatch.setattr("ray.kill", fail)
    await RayCluster(ProcessesConfig()).kill(None)
    assert "no such actor" in caplog.text
