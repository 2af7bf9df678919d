"""Real engine processes over scripted runners, on GPUs of which they see nothing but the environment."""

import logging
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import pytest
import trio
from attrs import define

from tests.engine.engines import linked_engine
from tests.fake_nvidia_smi import EIGHT, LABELS, UUIDS
from tests.lanes import sampled
from tests.server.server_process import until
from trio_pool_serve.config import Config, ModelConfig, ProcessesConfig
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.gpus import Gpu, parse_listing
from trio_pool_serve.engine.places import supervisor
from trio_pool_serve.engine.places.supervisor import LocalPlaces, Place
from trio_pool_serve.engine.process_placement import with_replicas
from trio_pool_serve.engine.remote.connectors import unix_connector
from trio_pool_serve.errors import EngineDeadError, ModelLoadError, unwrap_exception_groups
from trio_pool_serve.types import Embed, PoolingRequest, RenderedPrompt

GPUS = parse_listing(EIGHT)

LOADER = "tests.server.programs.script:load_scripted"


@define(eq=False)
class Machine:
    """What the engine processes of one test share."""

    folder: Path
    sockets: Path
    broken: Path

    def make(self, *models: str, gpus: list[Gpu] = GPUS, device: str = "cuda", **settings):
        sources = tuple(f"{model}={self.folder}" for model in models or ("m",))
        config = Config(
            models=sources, loading=ModelConfig(device=device), processes=ProcessesConfig(engine="process", **settings)
        )
        config = with_replicas(config, len(gpus))
        return LocalPlaces(config, LOADER, self.sockets, gpus)

    def breaks(self, **how: str) -> None:
        """Say how the process of a GPU, ``gpu2`` for example, fails to load: ``raises``, ``exits`` or ``is-killed``."""
        lines = [f"{UUIDS[int(gpu.removeprefix('gpu'))]} {end}\n" for gpu, end in how.items()]
        written = self.broken.with_suffix(".new")
        written.write_text("".join(lines))
        written.rename(self.broken)


@pytest.fixture
def machine(scripted_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("SCRIPT_BROKEN", str(tmp_path / "broken"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with TemporaryDirectory() as sockets:
        machine = Machine(scripted_folder, Path(sockets), tmp_path / "broken")
        machine.breaks()
        yield machine


@asynccontextmanager
async def running(engines: LocalPlaces) -> AsyncIterator[None]:
    with trio.fail_after(300), unwrap_exception_groups(ModelLoadError, EngineDeadError):
        async with trio.open_nursery() as nursery:
            await nursery.start(engines.run)
            yield
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def asking(engines: LocalPlaces) -> AsyncIterator[Engine]:
    engine = linked_engine([unix_connector(replica.path) for replica in engines.places])
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        yield engine
        nursery.cancel_scope.cancel()


def states(engines: LocalPlaces) -> list[str]:
    return [replica.state for replica in engines.places]


def kill(engines: LocalPlaces, place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Kill the process of a place: the last that was logged as ready."""
    (*_, pid) = re.findall(rf"engine process (\d+) is ready: {re.escape(str(place))}:", caplog.text)
    psutil.Process(int(pid)).kill()


REQUEST = PoolingRequest(RenderedPrompt(np.array([5], np.int32)), (Embed(),))


# -- placement ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("models", "settings", "gpus", "expected"),
    [
        ("m", {"replicas": 1}, range(8), [0]),
        ("m", {}, range(8), [0, 1, 2, 3, 4, 5, 6, 7]),
        ("m", {"replicas": "2/gpu"}, range(8), [*range(8), *range(8)]),
        ("m", {"replicas": 16}, range(8), [*range(8), *range(8)]),
        ("m", {"replicas": 10}, range(8), [*range(8), 0, 1]),
        ("ab", {}, range(8), [*range(8), *range(8)]),
        ("ab", {"replicas": 3}, range(8), [0, 1, 2, 3, 4, 5]),
        ("abc", {"replicas": 3}, range(8), [0, 1, 2, 3, 4, 5, 6, 7, 0]),
        ("ab", {"replicas": 3}, [3], [3, 3, 3, 3, 3, 3]),
        ("ab", {"replicas": "2/gpu"}, [5, 2], [5, 2, 5, 2, 5, 2, 5, 2]),
    ],
    ids=str,
)
def test_replicas_take_turns_on_the_gpus(machine, models, settings, gpus, expected):
    places = machine.make(*models, gpus=[GPUS[number] for number in gpus], **settings).places
    assert [place.gpu.number for place in places] == expected
    assert [place.replica.device for place in places] == [LABELS[number] for number in expected]
    assert len({place.path for place in places}) == len(places)


def test_without_known_gpus_the_device_is_that_of_the_settings(machine):
    assert [place.replica.device for place in machine.make(gpus=[], device="cuda:1").places] == ["cuda:1"]
    assert [place.replica.device for place in machine.make(gpus=[], device="cpu", replicas=2).places] == ["cpu"] * 2


async def test_processes_on_cpu_and_on_unknown_gpus_have_this_processs_environment(machine, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    for device in ("cpu", "cuda:1"):
        engines = machine.make(gpus=[], device=device, replicas=1)
        async with running(engines):
            await until(lambda engines=engines: states(engines) == ["ready"])
        assert f"m: {device} of CUDA_VISIBLE_DEVICES=5" in caplog.text


@pytest.mark.slow
async def test_a_single_gpu_is_left_for_the_cpu_only_by_auto(machine, caplog):
    caplog.set_level(logging.INFO)
    for device, gpus, seen in (("auto", GPUS[:1], "auto"), ("cuda", GPUS[:1], "cuda:0"), ("auto", GPUS[:2], "cuda:0")):
        caplog.clear()
        engines = machine.make(gpus=gpus, device=device, replicas=1)
        async with running(engines):
            await until(lambda engines=engines: states(engines) == ["ready"])
        assert f"{seen} of CUDA_VISIBLE_DEVICES={UUIDS[0]}" in caplog.text


@pytest.mark.parametrize("daemon", [True, False])
async def test_replicas_that_share_a_gpu_are_said_to_take_turns_or_not(machine, caplog, monkeypatch, daemon):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(machine.sockets))
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(machine.sockets / "control"))
        if daemon:
            control.listen()
        with trio.move_on_after(0):  # before a process starts
            await machine.make().run()
        assert "on the same GPU" not in caplog.text
        with trio.move_on_after(0):
            await machine.make(replicas=9).run()
    assert ("concurrently" in caplog.text) == daemon
    assert ("take turns" in caplog.text) != daemon
    assert f"{LABELS[0]} (GPU 0, NVIDIA H100 80GB HBM3): m, replica 0; m, replica 8" in caplog.text


# -- several replicas on one GPU ------------------------------------------------------------------------


async def test_replicas_on_one_gpu_divide_its_memory_and_one_that_is_killed_leaves_the_others_answering(
    machine, caplog, monkeypatch
):
    """So does a fault after which all of them have to end, as of a GPU with MPS: each place has a process again."""
    caplog.set_level(logging.INFO)
    free = machine.folder.parent / "free"
    free.write_text("30000")
    monkeypatch.setenv("SCRIPT_FREE_BYTES", str(free))
    engines = machine.make(gpus=GPUS[:1], replicas="2/gpu")
    first, other = engines.places

    def kill_all(places: list[Place]) -> None:
        for place in places:
            kill(engines, place, caplog)

    async with running(engines), asking(engines) as engine:
        await until(lambda: states(engines) == ["ready"] * 2)  # and so has its description: it may be connected before
        await until(lambda: len(engine.queue.dispatcher.devices) == 2)
        shares = {re.findall(r"with (\d+) bytes", place.description)[0] for place in engines.places}
        assert shares == {"14250"}
        free.write_text("500")  # what a process that comes later would find
        kill_all([first])
        while first.restarts == 0 or first.state != "ready":
            await engine.submit_all([REQUEST] * 5)
        kill_all([first, other])
        await until(lambda: [place.restarts for place in engines.places] == [2, 1])
        await until(lambda: states(engines) == ["ready"] * 2)
        await until(lambda: len(engine.queue.dispatcher.devices) == 2)
        await engine.submit_all([REQUEST] * 50)
        assert all("with 14250 bytes" in place.description for place in engines.places)


@pytest.mark.slow
async def test_once_the_private_folder_was_removed_a_replaced_process_gets_what_the_others_leave(
    machine, caplog, monkeypatch
):
    caplog.set_level(logging.INFO)
    free = machine.folder.parent / "free"
    free.write_text("30000")
    monkeypatch.setenv("SCRIPT_FREE_BYTES", str(free))
    engines = machine.make(gpus=GPUS[:1], replicas="2/gpu")
    async with running(engines):
        await until(lambda: states(engines) == ["ready"] * 2)
        assert "with 14250 bytes" in engines.places[1].description
        (machine.sockets / "0.memory").unlink()
        free.write_text("16000")
        kill(engines, engines.places[1], caplog)
        await until(lambda: "with 15200 bytes" in engines.places[1].description)


# -- failures -------------------------------------------------------------------------------------------


@sampled("how", ["raises", "exits"], keep=["exits"])
async def test_a_replica_that_fails_to_load_leaves_the_others_and_is_tried_again(machine, caplog, monkeypatch, how):
    monkeypatch.setattr(supervisor, "RETRY_FAILED_S", 0.2)
    machine.breaks(gpu1=how)
    engines = machine.make(gpus=GPUS[:3])
    async with running(engines), asking(engines) as engine:
        failed = engines.places[1]
        await until(lambda: failed.restarts >= 2)
        await until(lambda: [engines.places[0].state, engines.places[2].state] == ["ready"] * 2)
        assert f"m, replica 1 on {LABELS[1]} failed, leaving 2 of 3 replicas" in caplog.text
        assert ("CUDA error" if how == "raises" else "exited with status 5") in caplog.text
        await engine.wait_ready()
        await engine.submit_all([REQUEST] * 50)
        machine.breaks()
        await until(lambda: states(engines) == ["ready"] * 3)
        await until(lambda: len(engine.queue.dispatcher.devices) == 3)
        await engine.submit_all([REQUEST] * 50)


async def test_a_process_that_a_signal_ends_while_it_loads_for_the_first_time_is_replaced(machine, caplog):
    """The system may have had no memory left: that says nothing of the model."""
    machine.breaks(gpu0="is-killed")
    engines = machine.make(gpus=GPUS[:1])
    async with running(engines):
        await until(lambda: engines.places[0].restarts == 1)
        machine.breaks()
        await until(lambda: states(engines) == ["ready"])
    assert "ended by signal 9; the next one starts in 0 s" in caplog.text
    assert "has failed" not in caplog.text


@pytest.mark.slow
async def test_one_model_that_fails_on_all_of_its_gpus_ends_the_server_though_another_has_some(machine):
    machine.breaks(gpu2="raises", gpu3="raises")
    engines = machine.make("a", "b", gpus=GPUS[:4], replicas=2)
    with pytest.raises(ModelLoadError, match=r"^b cannot be loaded: CUDA error: GPU-000000a[23]-.* is broken$"):
        async with running(engines):
            await trio.sleep_forever()
    assert states(engines)[2:] == ["failed", "failed"]


async def test_a_replica_that_keeps_dying_fails_alone_and_the_last_one_ends_the_server(machine, caplog, monkeypatch):
    monkeypatch.setattr(supervisor, "MAX_RESTARTS", 1)
    caplog.set_level(logging.INFO)
    engines = machine.make(gpus=GPUS[:2])
    first, second = engines.places
    with pytest.raises(EngineDeadError, match=r"replica 0 on .* restarted 1 times in a row: giving up"):
        async with running(engines), asking(engines) as engine:
            await until(lambda: states(engines) == ["ready"] * 2)  # so that `kill` finds them
            await until(lambda: len(engine.queue.dispatcher.devices) == 2)
            for death in range(2):
                kill(engines, second, caplog)
                if death == 0:
                    await until(lambda: second.restarts == 1 and second.state == "ready")
            await until(lambda: second.state == "failed" and len(engine.queue.dispatcher.devices) == 1)
            assert engine.state == "ready"
            await engine.submit_all([REQUEST] * 50)
            for death in range(2):
                kill(engines, first, caplog)
                if death == 0:
                    await until(lambda: first.restarts == 1 and first.state == "ready")
            await trio.sleep_forever()


@pytest.mark.slow
async def test_a_failed_replica_that_dies_again_soon_fails_at_once(machine, caplog, monkeypatch):
    monkeypatch.setattr(supervisor, "MAX_RESTARTS", 1)
    monkeypatch.setattr(supervisor, "RETRY_FAILED_S", 0.01)
    caplog.set_level(logging.INFO)
    engines = machine.make(gpus=GPUS[:2])
    second = engines.places[1]
    async with running(engines):
        await until(lambda: states(engines) == ["ready"] * 2)
        for failures in (0, 1, 2):
            # Two deaths make it fail at first, then one each time.
            kill(engines, second, caplog)
            await until(lambda restarts=failures + 1: second.restarts == restarts and second.state == "ready")
            assert caplog.text.count(" failed, leaving") == failures
        assert engines.places[0].restarts == 0


@pytest.mark.slow
async def test_a_process_on_cpu_that_is_killed_leaves_its_share_of_the_cores_to_the_others(machine, caplog):
    caplog.set_level(logging.INFO)
    engines = machine.make(gpus=[], device="cpu", replicas=2)
    async with running(engines):
        await until(lambda: states(engines) == ["ready"] * 2)
        computed_at = np.memmap(machine.sockets / "cores", np.float64)
        computed_at[1] = np.inf  # as while it computes
        kill(engines, engines.places[1], caplog)
        await until(lambda: engines.places[1].restarts == 1)
        assert computed_at[1] == -np.inf
        assert computed_at[0] > 0
