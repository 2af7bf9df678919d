"""A real server whose models change: what signals and restarts do to that."""

from pathlib import Path

import httpx
import pytest
import trio

from tests.conftest import client_of
from tests.load.raw_server import listening
from tests.model_folders import write_scripted_folder
from tests.pipes import read
from tests.server.server_process import scripted
from tests.serving.changing_models import ADMIN


@pytest.mark.slow
async def test_a_server_that_is_stopped_while_it_loads_a_model_answers_others_and_ends(tmp_path: Path, pipes: Path):
    for name in ("a", "endless"):
        write_scripted_folder(tmp_path / name)
    flags = (f"a={tmp_path / 'a'}", "--model-api", "--api-key", "admin-key", "--drain-timeout-s", "1")
    failures: list[httpx.HTTPError] = []
    async with (
        scripted(tmp_path, *flags) as server,
        client_of(server.url) as client,
        trio.open_nursery() as nursery,
    ):

        async def load() -> None:
            try:
                await client.post("/v1/models", json={"model": str(tmp_path / "endless"), "name": "b"}, headers=ADMIN)
            except httpx.HTTPError as error:
                failures.append(error)

        nursery.start_soon(load)
        await read(pipes / "launched")
        body = {"model": "a", "input": "hello"}
        assert (await client.post("/v1/embeddings", json=body, headers=ADMIN)).status_code == 200
        server.signal()
        assert await server.wait_exit(30) == 0
    assert len(failures) == 1


@pytest.mark.slow
async def test_a_download_that_hangs_holds_up_no_other_change(tmp_path: Path):
    for name in ("a", "b"):
        write_scripted_folder(tmp_path / name)
    env = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hub"), "HF_HUB_ETAG_TIMEOUT": "600"}
    flags = (f"a={tmp_path / 'a'}", "--model-api", "--api-key", "admin-key")
    answers: list[tuple[str, int]] = []
    is_asked = trio.Event()

    async def hang(stream: trio.SocketStream) -> None:
        is_asked.set()
        await trio.sleep_forever()

    async with (
        listening(hang) as port,
        scripted(
            tmp_path, *flags, env=env | {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "NO_PROXY": "127.0.0.1"}
        ) as server,
        client_of(server.url) as client,
    ):

        async def load(model: str, name: str) -> None:
            answer = await client.post("/v1/models", json={"model": model, "name": name}, headers=ADMIN)
            answers.append((name, answer.status_code))

        async with trio.open_nursery() as loading:
            loading.start_soon(load, "someone/hangs", "hangs")
            with trio.fail_after(60):
                await is_asked.wait()
                await load(str(tmp_path / "b"), "b")
                body = {"model": "b", "input": "hello"}
                assert (await client.post("/v1/embeddings", json=body, headers=ADMIN)).status_code == 200
                metrics = (await client.get("/metrics", headers=ADMIN)).text
                assert 'trio_pool_serve_limiter_borrowed{of="download"} 1.0' in metrics
                assert (await client.delete("/v1/models/b", headers=ADMIN)).status_code == 200
                assert (await client.delete("/v1/models/hangs", headers=ADMIN)).status_code == 200
        assert answers == [("b", 200), ("hangs", 409)]
        server.signal()
        assert await server.wait_exit(30) == 0
