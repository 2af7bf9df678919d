"""SIGHUP has a real server read its API keys again."""

import signal

from tests.server.server_process import ServerProcess, scripted


async def status(server: ServerProcess, key: str) -> int:
    return (await server.get("/v1/models", headers={"x-api-key": key})).status_code


async def test_keys_are_read_again_on_sighup_and_a_broken_file_changes_nothing(tmp_path, scripted_folder):
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
        await server.drain()
