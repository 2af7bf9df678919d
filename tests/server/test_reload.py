"""SIGHUP has a real server read its API keys again."""

import json
import os
import signal

import pytest

from tests.server.server_process import LAUNCHER, ServerProcess, free_port, scripted, started


async def status(server: ServerProcess, key: str) -> int:
    return (await server.get("/v1/models", headers={"x-api-key": key})).status_code


@pytest.mark.slow
async def test_notes_about_settings_are_events_of_the_log_each_once(tmp_path):
    """Also what is noticed before the server starts: it is read twice, but told once."""
    keys = tmp_path / "keys.toml"
    keys.write_text("[a]\nkey = 'first'")
    keys.chmod(0o644)
    flags = ("--api-keys-file", keys, "--runner", "pooling", "--port", str(free_port()))
    with started([*LAUNCHER, tmp_path / "none", *flags], 0, tmp_path / "server.log", {}) as server:
        _, log = await server.wait_exit_and_log()
    said = [json.loads(line)["message"] for line in log.splitlines()]
    for note in ("mode 644", "--runner=pooling is accepted", "is neither a folder nor"):
        assert [note in each for each in said].count(True) == 1


async def test_keys_are_read_again_on_sighup_and_a_broken_file_changes_nothing(tmp_path, scripted_folder):
    """A pipe, which may never end, is not read; SIGHUP just before SIGTERM does not change the exit status."""
    keys = tmp_path / "keys.toml"
    keys.touch(0o600)
    keys.write_text("[a]\nkey = 'first'")
    flags = ("--api-keys-file", str(keys), "--engine", "local")
    async with scripted(tmp_path, scripted_folder, *flags) as server:
        assert [await status(server, key) for key in ("first", "second")] == [200, 401]
        keys.write_text("[a]\nkey = 'second'")
        server.signal(signal.SIGHUP)
        await server.wait_logged("reloaded the API keys")
        assert [await status(server, key) for key in ("first", "second")] == [401, 200]
        keys.write_text("[a")
        server.signal(signal.SIGHUP)
        await server.wait_logged("reloading the API keys failed")
        assert [await status(server, key) for key in ("first", "second")] == [401, 200]
        keys.unlink()
        os.mkfifo(keys)
        server.signal(signal.SIGHUP)
        await server.wait_logged("keys.toml is not a regular file")
        keys.unlink()
        keys.touch(0o600)
        keys.write_text("[a]\nkey = 'third'")
        server.signal(signal.SIGHUP)
        await server.wait_logged("reloaded the API keys", 2)
        assert [await status(server, key) for key in ("second", "third")] == [401, 200]
        server.signal(signal.SIGHUP)
        await server.drain()
