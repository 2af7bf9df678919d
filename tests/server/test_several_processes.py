"""A server of several processes: real ones, ended by real signals."""

import os
import shutil
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
import trio

from tests.lanes import sampled
from tests.pipes import write
from tests.server.programs import script
from tests.server.server_process import (
    API_PROCESS,
    ENGINE_PROCESS,
    SCRIPTED,
    ServerProcess,
    scripted,
    until,
    until_ended,
)
from trio_pool_serve.config.computing_config import LEAST_SILENCE_S

BY_PROCESS = ("--engine", "process")

# -- an engine process ---------------------------------------------------------------------------------


async def test_an_engine_process_that_dies_fails_its_requests_at_once_and_another_takes_its_place(
    pipes, scripted_folder
):
    async with scripted(pipes, scripted_folder, *BY_PROCESS, "--replicas", "1") as server:
        (engine,) = server.processes(ENGINE_PROCESS)
        async with server.waiting_request(pipes) as answers:
            engine.kill()
        (answer,) = answers
        assert answer.status_code == 503
        assert "died" in answer.json()["error"]["message"]
        assert int(answer.headers["Retry-After"]) > 0
        assert (await server.get("/readyz")).status_code == 503
        assert (await server.get("/livez")).status_code == 200
        await server.wait_until("/readyz")
        await server.ask_well()
        assert "ended by signal 9" in server.log
        (other,) = server.processes(ENGINE_PROCESS)
        assert other.pid != engine.pid
        await server.drain()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs another user, and setpriv")
async def test_a_server_survives_when_its_user_may_start_no_more_processes(pipes, scripted_folder):
    """An engine is killed meanwhile, and comes back when its process may be started."""
    pipes.chmod(0o777)
    as_other = ["setpriv", "--reuid", "54321", "--clear-groups"]
    capabilities = "+dac_override,+dac_read_search"  # the files of the tests are the first user's
    command = [*as_other, "--inh-caps", capabilities, "--ambient-caps", capabilities, *SCRIPTED]

    async def limit(server: ServerProcess, processes: int) -> None:
        for each in [server.process.pid, *(one.pid for one in server.processes(ENGINE_PROCESS))]:
            await trio.run_process([*as_other, "prlimit", "--pid", str(each), f"--nproc={processes}:"])

    async with scripted(pipes, scripted_folder, *BY_PROCESS, "--replicas", "1", command=command) as server:
        await limit(server, 1)
        (engine,) = server.processes(ENGINE_PROCESS)
        engine.kill()
        await server.wait_logged("engine_process cannot be started", times=2)
        assert (await server.ask(5)).status_code == 503
        assert (await server.get("/livez")).status_code == 200
        await limit(server, 2000)
        await server.wait_until("/readyz")
        await server.wait_computing()
        await server.drain()


@pytest.mark.slow
async def test_an_engine_that_gives_up_ends_nothing_else(pipes, scripted_folder):
    async with scripted(pipes, scripted_folder, *BY_PROCESS, "--replicas", "1") as server:
        for how in (script.LOSES_THE_DEVICE, script.EXITS):
            (engine,) = server.processes(ENGINE_PROCESS)
            assert (await server.ask(how)).status_code == 503
            await until(
                lambda left=engine.pid: [one.pid for one in server.processes(ENGINE_PROCESS)] not in ([], [left])
            )
            await server.wait_until("/readyz")
            await server.ask_well()
            assert (await server.ask(script.RAISES)).status_code == 500


@pytest.mark.slow
async def test_an_engine_that_stalls_is_not_ready_until_it_goes_on_and_its_server_lives(pipes, scripted_folder):
    arguments = ("--replicas", "1", "--api-workers", "2", "--batch-timeout-s", "10")
    async with scripted(pipes, scripted_folder, *BY_PROCESS, *arguments) as server:

        async def stalls(reason: str) -> None:
            told: dict[str, str] = {}
            with trio.fail_after(60):
                while reason not in told.get("reason", ""):
                    told = (await server.get("/readyz")).json()
            assert told["status"] == "stalled"
            assert (await server.get("/livez")).status_code == 200

        async with server.waiting_request(pipes):
            await stalls("in flight")
            await write(pipes / "go", "go")
        await server.wait_until("/readyz")
        (engine,) = server.processes(ENGINE_PROCESS)
        engine.suspend()
        await stalls("silent")
        engine.resume()
        await server.wait_until("/readyz")
        await server.ask_well()


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_stopped_engine_process_is_killed_and_replaced_and_a_pause_of_all_processes_costs_none(
    pipes, scripted_folder, workers
):
    """A batch may take 2 s, an engine process be silent for 5. All are paused for longer, with a batch in flight."""
    arguments = ("--replicas", "1", "--api-workers", workers, "--batch-timeout-s", "2")
    async with scripted(pipes, scripted_folder, *BY_PROCESS, *arguments) as server:
        await server.wait_joined(int(workers))
        (engine,) = server.processes(ENGINE_PROCESS)
        family = [psutil.Process(server.process.pid), *server.family()]
        async with server.waiting_request(pipes) as answers:
            for process in family:
                process.suspend()
            await trio.sleep(LEAST_SILENCE_S + 1)
            for process in family:
                process.resume()
            await write(pipes / "go", "go")
        assert [answer.status_code for answer in answers] == [200]
        await server.ask_well()
        assert server.processes(ENGINE_PROCESS) == [engine]
        engine.suspend()
        answer = await server.ask(5)
        assert answer.status_code == 503
        assert "died" in answer.json()["error"]["message"]
        await server.wait_logged(f"process {engine.pid} is killed: it has been silent for 5 s")
        await server.wait_computing()
        assert engine not in server.processes(ENGINE_PROCESS)
        await server.drain()


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files of servers go: a short name, as a socket's path has at most 107 bytes."""
    with TemporaryDirectory() as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


async def test_a_private_folder_that_a_cleaner_has_removed_is_made_again_and_processes_are_replaced(
    pipes, scripted_folder, temporary
):
    async with scripted(pipes, scripted_folder, *BY_PROCESS, "--replicas", "1", "--api-workers", "2") as server:
        (folder,) = temporary.glob("trio_pool_serve-*")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        await server.wait_joined(2)
        (first,) = server.processes(ENGINE_PROCESS)
        shutil.rmtree(folder)
        first.kill()
        await server.wait_logged("and was created again")
        await server.wait_computing()
        (second,) = server.processes(ENGINE_PROCESS)
        shutil.rmtree(folder)
        await server.wait_computing()  # one of the API processes may not be connected yet
        await until(lambda: [*folder.glob("*.engine")])
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (api, *_) = server.processes(API_PROCESS)
        api.kill()
        await server.wait_joined(2)
        await server.ask_well()
        assert server.processes(ENGINE_PROCESS) == [second]
        await server.drain()
        assert not folder.exists()


# -- several processes that answer ----------------------------------------------------------------------


async def test_several_processes_answer_count_over_all_and_end_with_a_server_that_is_killed(pipes, scripted_folder):
    async with scripted(pipes, scripted_folder, *BY_PROCESS, "--api-workers", "2", "--replicas", "2") as server:
        await until(lambda: server.log.count("is ready") == 2)
        await server.wait_joined(2)
        for number in range(40):
            await server.ask_well(5, number)
        for _ in range(4):  # whichever process is asked
            lines = (await server.get("/metrics")).text.splitlines()
            load = (await server.get("/load")).json()
            assert "trio_pool_serve_requests_total 40.0" in lines
            (rows,) = (line for line in lines if line.startswith("trio_pool_serve_batch_rows_sum"))
            assert float(rows.split()[1]) == 40
            (model,) = load["models"].values()
            assert (model["state"], model["batches"], model["queued_rows"]) == ("ready", 40, 0)
            assert load["limiters"]["render"]["capacity"] == 4, "of two processes that answer"
        family = server.family()
        assert len(server.processes(ENGINE_PROCESS)) == len(server.processes(API_PROCESS)) == 2
        server.process.kill()
        await until_ended(family)


async def test_an_api_process_that_dies_is_replaced_and_no_client_meets_one_that_is_loading(pipes, scripted_folder):
    async with scripted(pipes, scripted_folder, *BY_PROCESS, "--api-workers", "2", "--replicas", "1") as server:
        await until(lambda: len(server.processes(API_PROCESS)) == 2)
        one, other = server.processes(API_PROCESS)
        one.kill()
        await until(lambda: one not in server.processes(API_PROCESS))
        await server.wait_joined(2, meanwhile=server.ask_well)
        assert len(set(server.processes(API_PROCESS)) - {one, other}) == 1
        for _ in range(100):
            await server.ask_well()


@sampled("workers", ["1", "2"], keep=["2"])
async def test_a_request_that_has_begun_is_answered_before_the_processes_leave(pipes, scripted_folder, workers):
    async with scripted(pipes, scripted_folder, *BY_PROCESS, "--api-workers", workers, "--replicas", "1") as server:
        family = server.family()
        async with server.waiting_request(pipes) as answers:
            for process in family:  # as systemd and terminals do
                process.terminate()
            server.signal()
            await server.wait_logged("draining")
            await write(pipes / "go", "go")
        assert [answer.status_code for answer in answers] == [200]
        assert await server.wait_exit() == 0
        assert not any(process.is_running() and process.status() != "zombie" for process in family)


@pytest.mark.slow
async def test_processes_that_have_not_joined_yet_leave_when_all_are_told_to_drain(pipes, scripted_folder):
    arguments = ("--api-workers", "2", "--replicas", "1", "--drain-timeout-s", "300")
    async with scripted(pipes, scripted_folder, *BY_PROCESS, *arguments) as server:
        (engine,) = server.processes(ENGINE_PROCESS)
        engine.suspend()  # who has not met it yet, waits for it
        await server.wait_joined(2)
        server.signal()
        await until(lambda: server.processes(API_PROCESS) == [])
        engine.resume()
        assert await server.wait_exit() == 0


@sampled("workers", ["1", "2"], keep=["2"])
async def test_a_second_signal_ends_everything(pipes, scripted_folder, workers):
    async with scripted(pipes, scripted_folder, *BY_PROCESS, "--api-workers", workers, "--replicas", "1") as server:
        family = server.family()
        async with server.waiting_request(pipes) as answers:
            server.signal()
            await server.wait_logged("draining")
            server.signal(signal.SIGINT)
            assert await server.wait_exit() == 128 + signal.SIGINT
        assert answers == [None], "cut off"
        await until_ended(family)
