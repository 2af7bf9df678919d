"""What is set process-wide: by the entry points of a server, and not by a service itself."""

import gc
import os
import sys
from pathlib import Path

import pytest
import trio

from tests.conftest import running
from tests.server.programs import script
from tests.server.server_process import API_PROCESS, ROOT, SCRIPTED_ASGI, ServerProcess, hypercorned, scripted
from trio_pool_serve.process_setup import SWITCH_INTERVAL_S, configure_process
from trio_pool_serve.service import Service
from trio_pool_serve.threads.offload import NICENESS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness belongs to processes")

DEFAULT_SWITCH_INTERVAL_S = 0.005
SPINS = 10_000
LONG_TEXT = "hello " * 2000


@pytest.fixture(autouse=True)
def no_openmp_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)


async def settings_where_computed(server: ServerProcess) -> list[float]:
    """Return the settings of the process that computes, and of the thread that launches batches."""
    answer = await server.ask(script.TELLS_SETTINGS)
    frozen, interval, niceness, spins, *_ = answer.json()["data"][0]["embedding"]
    assert frozen > 10_000, "objects, of the imported modules alone"
    return [round(interval, 6), niceness, spins]


async def test_a_service_inside_another_program_sets_nothing(config, scripted):
    frozen, *before = await trio.to_thread.run_sync(script.process_settings)
    environment = dict(os.environ)
    async with running(Service(config, lambda *_: scripted)) as service:
        for kind in service.offload.statistics():
            await service.offload.run(kind, script.process_settings)
    still_frozen, *after = await trio.to_thread.run_sync(script.process_settings)
    assert still_frozen <= frozen, "objects that nothing refers to any more are freed all the same"
    assert (after, dict(os.environ)) == (before, environment)


SERVES = """
import gc, sys
from trio_pool_serve.__main__ import main
from trio_pool_serve.server import launcher

async def serve(*_):
    print(gc.isenabled(), gc.get_freeze_count() > 10_000)

launcher.serve = serve
sys.argv = ["trio-pool-serve", "serve", sys.argv[1]]
main()
"""


async def test_garbage_is_collected_once_all_is_imported(scripted_folder):
    finished = await trio.run_process(
        [sys.executable, "-c", SERVES, str(scripted_folder)], cwd=ROOT, capture_stdout=True
    )
    assert finished.stdout == b"True True\n"


async def test_a_program_s_own_on_loaded_is_still_called(config, scripted, monkeypatch):
    monkeypatch.setattr("trio_pool_serve.process_setup.limit_openmp_spinning", lambda: None)
    frozen_when_called: list[int] = []
    service = Service(config, lambda *_: scripted, on_loaded=lambda: frozen_when_called.append(gc.get_freeze_count()))
    interval = sys.getswitchinterval()
    gc.unfreeze()
    configure_process(service)
    try:
        async with running(service):
            (frozen,) = frozen_when_called
    finally:
        sys.setswitchinterval(interval)
    assert frozen > 10_000, "objects, of the imported modules alone"


@pytest.mark.slow
async def test_a_server_that_computes_itself_sets_all_as_does_the_lifespan_under_plain_hypercorn(
    tmp_path, scripted_folder
):
    env = {"TRIO_POOL_SERVE_MODEL": str(scripted_folder)}
    for starting in (
        scripted(tmp_path, scripted_folder),
        hypercorned(tmp_path, SCRIPTED_ASGI, env=env),
    ):
        async with starting as server:
            assert await settings_where_computed(server) == [SWITCH_INTERVAL_S, NICENESS, SPINS]


async def test_an_engine_process_is_set_for_computing_and_an_api_process_for_rendering(tmp_path, scripted_folder):
    arguments = ("--engine", "process", "--replicas", "1", "--api-workers", "2")
    async with scripted(tmp_path, scripted_folder, *arguments) as server:
        assert await settings_where_computed(server) == [DEFAULT_SWITCH_INTERVAL_S, NICENESS, SPINS]
        assert (await server.post({"input": LONG_TEXT, "truncate_prompt_tokens": -1})).status_code == 200
        children = server.processes(API_PROCESS)
        assert len(children) == 2
        assert {0, NICENESS} in [niceness_above_main_thread(child.pid) for child in children]


def niceness_above_main_thread(pid: int) -> set[int]:
    """Return by how much the threads of a process are nicer than its main thread."""
    own = os.getpriority(os.PRIO_PROCESS, pid)
    return {os.getpriority(os.PRIO_PROCESS, int(task.name)) - own for task in Path(f"/proc/{pid}/task").iterdir()}
