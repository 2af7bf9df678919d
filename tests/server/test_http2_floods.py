"""HTTP/2 floods against a real server: others are served meanwhile, and nothing is left of them."""

import sys

import httpx
import psutil
import pytest
import trio

from tests.server.server_process import ROOT, ServerProcess, scripted, until
from tests.server.test_tls import CLIENT, write_certificate

RUNS = ["resets", "resets", "unknown frames", "SETTINGS", "PING"]

SECONDS = 4

MANY = 16


def connected(url: str) -> httpx.AsyncClient:
    """Return a client that trusts the certificate of the server, if it has one."""
    return httpx.AsyncClient(base_url=url, timeout=300, verify=CLIENT)


async def probe(url: str, limit_s: float) -> None:
    """Ask for ``/livez`` over a new connection; raises ``TooSlowError`` if there is no response in time."""
    with trio.fail_after(limit_s):
        async with connected(url) as client:
            assert (await client.get("/livez")).status_code == 200


async def flood(server: ServerProcess, kind: str, *more: str) -> None:
    """Flood a server from a process of its own, and send it probes meanwhile, one after the other."""
    program = [sys.executable, "-m", "benchmarks.http2_floods", kind, str(server.port)]
    command = [*program, "--connections", str(MANY), "--seconds", str(SECONDS), *more]
    url, probes = server.url.replace("http", "https" if more else "http"), 0
    async with trio.open_nursery() as nursery:
        process = await nursery.start(lambda task_status: trio.run_process(command, cwd=ROOT, task_status=task_status))
        while process.poll() is None:
            await probe(url, 2)
            probes += 1
    assert probes > SECONDS
    await probe(url, 1)


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_sixteen_connections_that_flood_and_connect_anew_stop_nobody_else(tmp_path, scripted_folder, tls):
    """`/livez` responds within 2 s meanwhile and 1 s afterwards; the memory is returned."""
    flags, more = ["--engine", "local"], ()
    if tls:
        certfile, keyfile = write_certificate(tmp_path, "server")
        flags, more = [*flags, "--ssl-certfile", str(certfile), "--ssl-keyfile", str(keyfile)], ("--with-tls",)
    async with scripted(tmp_path, scripted_folder, *flags, wait_ready=False) as server:
        await server.wait_logged('"ready"')
        url = server.url.replace("http", "https") if tls else server.url
        memory, answered, is_over = psutil.Process(server.process.pid).memory_info, 0, False
        async with connected(url) as polite, trio.open_nursery() as nursery:

            async def compute() -> None:
                nonlocal answered
                while not is_over:
                    response = await polite.post("/v1/embeddings", json={"input": "hello"})
                    assert response.status_code == 200
                    answered += 1

            nursery.start_soon(compute)
            await until(lambda: answered > 200)
            before = memory().rss
            for kind in RUNS:
                answered = 0
                await flood(server, kind, *more)
                assert answered > SECONDS
            await until(lambda: memory().rss < 1.3 * before, 60)  # freed memory is returned as requests are computed
            is_over = True
        await server.drain()
