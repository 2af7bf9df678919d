"""nginx and HAProxy in front of two servers, with the configurations of the documentation."""

import json
import os
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
import trio
import trustme
from attrs import define

from tests.debian_programs import debian_program, nginx_command
from tests.pipes import read, write
from tests.server.programs import script
from tests.server.server_process import ROOT, ServerProcess, free_port, scripted, started, until

AUTHORITY = trustme.CA()

PROXIES = ("nginx", "haproxy")
MAX_BODY = 16 * 2**20
BODY = {"input": [5]}
LIMIT_S = 60


def trusting() -> ssl.SSLContext:
    """Return what a client trusts; it keeps the versions of HTTP that the client speaks, so each has its own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    AUTHORITY.configure_trust(context)
    return context


@define(eq=False)
class Proxied:
    """A proxy in front of servers."""

    proxy: str
    url: str
    servers: list[ServerProcess]

    def client(self, address: str | None = None, *, http2: bool = False) -> httpx.AsyncClient:
        """Return a client by TLS, at another address of this machine if given."""
        transport = httpx.AsyncHTTPTransport(verify=trusting(), local_address=address, http2=http2)
        return httpx.AsyncClient(base_url=self.url, transport=transport, timeout=LIMIT_S)


def filled_in(name: str, changes: dict[str, str]) -> str:
    """Return a file of the documentation with ports and paths of a test."""
    text = (ROOT / "docs" / name).read_text()
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    return text


def command_of(proxy: str, folder: Path, port: int, servers: list[ServerProcess]) -> list[str]:
    certificate = AUTHORITY.issue_cert("127.0.0.1")
    pem = folder / "proxy.pem"
    pem.write_bytes(certificate.private_key_and_cert_chain_pem.bytes())
    backends = {f"127.0.0.1:{8000 + index}": f"127.0.0.1:{each.port}" for index, each in enumerate(servers)}
    if proxy == "haproxy":
        changes = {"bind :443": f"bind 127.0.0.1:{port}", "/etc/haproxy/embeddings.pem": str(pem)}
        (folder / "haproxy.cfg").write_text(filled_in("haproxy.cfg", backends | changes))
        return [debian_program("haproxy"), "-db", "-f", str(folder / "haproxy.cfg")]
    changes = {
        "listen 443 ssl http2": f"listen 127.0.0.1:{port} ssl http2",
        "/etc/ssl/embeddings.pem": str(pem),
        "/etc/ssl/private/embeddings.key": str(pem),
    }
    return nginx_command(folder, filled_in("nginx.conf", backends | changes))


@asynccontextmanager
async def proxied(
    tmp_path: Path, folder: Path, *arguments: str, env: dict[str, str] | None = None, wait_ready: bool = True
) -> AsyncIterator[list[Proxied]]:
    """Start two servers, and each proxy in front of both."""
    path = "/readyz" if wait_ready else "/livez"
    given = (f"m={folder}", *arguments, "--engine", "local", "--trusted-proxies", "127.0.0.1")
    async with AsyncExitStack() as stack:
        servers = []
        for name in ("first", "second"):
            launching = scripted(tmp_path / name, *given, env=env, wait_ready=False)
            servers.append(await stack.enter_async_context(launching))
        for server in servers:
            await server.wait_until(path)
        fronts = []
        for proxy in PROXIES:
            port = free_port()
            command = command_of(proxy, tmp_path, port, servers)
            process = stack.enter_context(started(command, port, tmp_path / f"{proxy}.log", {}))
            fronts.append(Proxied(proxy, f"https://127.0.0.1:{port}", servers))
            async with fronts[-1].client() as client:

                async def answers(client: httpx.AsyncClient = client, process: ServerProcess = process) -> bool:
                    assert process.process.poll() is None, process.log
                    with suppress(httpx.TransportError):
                        return (await client.get(path)).status_code in (200, 503)
                    return False

                await until(answers, LIMIT_S)
        yield fronts


def connections_to(server: ServerProcess) -> set[int]:
    """Return the ports from which connections to a server are open."""
    of_server = psutil.Process(server.process.pid).net_connections("tcp")
    return {each.raddr.port for each in of_server if each.status == "ESTABLISHED" and each.laddr.port == server.port}


async def test_requests_pass_with_their_bodies_streams_and_addresses(pipes: Path, scripted_folder: Path):
    env = {"SCRIPT_PIPES": str(pipes)}
    async with proxied(pipes, scripted_folder, "--access-log", env=env) as fronts:
        for front in fronts:
            async with front.client() as client:
                await answers_at_and_below_the_root(client)
                await has_the_limit_of_bodies(client, front.proxy)
                await streams(client, pipes)
                await keeps_connections(client, front)
            async with front.client(http2=True) as client:
                await answers_at_and_below_the_root(client)
                assert (await client.get("/x/readyz")).http_version == "HTTP/2"
            await tells_who_leaves(front, pipes)
            await tells_addresses(front)


async def answers_at_and_below_the_root(client: httpx.AsyncClient) -> None:
    for prefix in ("", "/x"):
        answer = await client.post(f"{prefix}/v1/embeddings", json=BODY)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["data"]) == 1
        models = (await client.get(f"{prefix}/v1/models")).json()["data"]
        assert (await client.get(f"{prefix}/v1/models/{models[0]['id']}")).status_code == 200
        page = await client.get(f"{prefix}/docs")
        assert (await client.get(page.url.join("docs/swagger-ui.css"))).status_code == 200
        assert (await client.get(f"{prefix}/v1/files?limit=1")).status_code == 200


async def has_the_limit_of_bodies(client: httpx.AsyncClient, proxy: str) -> None:
    begin, end = b'{"input": [5]', b"}"
    largest = begin + b" " * (MAX_BODY - len(begin) - len(end)) + end
    json_type = {"content-type": "application/json"}
    answer = await client.post("/x/v1/embeddings", content=largest, headers=json_type)
    assert answer.status_code == 200, answer.text
    answer = await client.post("/x/v1/embeddings", content=largest + b" ", headers=json_type)
    assert answer.status_code == 413
    assert (answer.headers["content-type"] == "application/json") == (proxy == "haproxy")
    lines = b'{"custom_id": "a"}\n'
    file = {"file": ("lines.jsonl", lines + b" " * MAX_BODY)}
    answer = await client.post("/x/v1/files", data={"purpose": "batch"}, files=file)
    assert answer.status_code == 200, answer.text
    assert answer.json()["bytes"] == len(lines) + MAX_BODY
    for prefix in ("", "/x", "", "/x"):  # it is at one server
        assert (await client.get(f"{prefix}/v1/files/{answer.json()['id']}")).status_code == 200


async def streams(client: httpx.AsyncClient, pipes: Path) -> None:
    """The first vector arrives while the second is not computed yet."""
    body = {"input": [[5] * 40, [script.WAITS] * 40], "stream": True}  # each is a batch
    async with client.stream("POST", "/x/v1/embeddings", json=body) as answer:
        lines = answer.aiter_lines()
        with trio.fail_after(LIMIT_S):
            assert json.loads((await anext(lines)).removeprefix("data: "))["index"] == 0
        await read(pipes / "launched")
        await write(pipes / "go", "go")
        rest = [line async for line in lines if line]
    assert json.loads(rest[0].removeprefix("data: "))["index"] == 1
    assert rest[-1] == "data: [DONE]"


async def keeps_connections(client: httpx.AsyncClient, front: Proxied) -> None:
    for _ in range(10):
        await client.post("/v1/embeddings", json=BODY)
    before = set[int]().union(*map(connections_to, front.servers))
    for _ in range(20):
        assert (await client.post("/v1/embeddings", json=BODY)).status_code == 200
    after = set[int]().union(*map(connections_to, front.servers))
    assert before & after
    assert len(after) < 10


async def tells_who_leaves(front: Proxied, pipes: Path) -> None:
    before = left(front)
    body = json.dumps({"input": [script.WAITS]})
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    port = httpx.URL(front.url).port
    async with await trio.open_ssl_over_tcp_stream("127.0.0.1", port, ssl_context=trusting()) as client:
        await client.send_all(f"{head}{body}".encode())
        await read(pipes / "launched")
    await until(lambda: left(front) != before)
    await write(pipes / "go", "go")


def left(front: Proxied) -> int:
    return [each.get("outcome") for each in logged(front)].count("client left")


async def tells_addresses(front: Proxied) -> None:
    for address, claimed in (("127.0.0.5", "9.9.9.9"), ("127.0.0.6", "127.0.0.1, 127.0.0.5")):
        async with front.client(address) as client:
            headers = {"x-forwarded-for": claimed}
            answer = await client.post("/v1/embeddings", json=BODY, headers=headers)
        asked = answer.headers["x-request-id"]
        await until(lambda asked=asked: asked in clients_of(front))
        assert clients_of(front)[asked] == address


def clients_of(front: Proxied) -> dict[str, str]:
    return {each["request_id"]: each["client"] for each in logged(front) if "request_id" in each}


def logged(front: Proxied) -> list[dict]:
    lines = (line for server in front.servers for line in server.log.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


@pytest.mark.slow
async def test_a_server_that_drains_loses_no_request_and_refusals_say_when_to_come_back(
    tmp_path: Path, scripted_folder: Path
):
    keys = tmp_path / "keys.toml"
    rare = "".join(f'[{each}]\nkey = "{each}-key"\nrequests_per_minute = 1\n' for each in PROXIES)
    keys.write_text(f'{rare}[often]\nkey = "often-key"\n')
    async with proxied(tmp_path, scripted_folder, "--api-keys-file", str(keys)) as fronts:
        for front in fronts:
            await is_refused_past_its_limit(front)
        (first, second), answers = fronts[0].servers, {front.proxy: Counter[int]() for front in fronts}
        is_over = trio.Event()

        async def ask_on(front: Proxied) -> None:
            async with front.client() as client:
                client.headers["Authorization"] = "Bearer often-key"
                while not is_over.is_set():
                    answer = await client.post("/v1/embeddings", json=BODY)
                    answers[front.proxy][answer.status_code] += 1

        async def until_answered(count: int) -> None:
            """Wait until each proxy has passed on so many more answers."""
            wanted = {proxy: count + answers[proxy].total() for proxy in answers}
            await until(lambda: all(answers[proxy].total() >= wanted[proxy] for proxy in answers))

        with trio.fail_after(LIMIT_S):
            async with trio.open_nursery() as nursery:
                for front in fronts * 4:
                    nursery.start_soon(ask_on, front)
                await until_answered(50)
                await first.drain()
                await until_answered(50)
                is_over.set()
        assert [*map(set, answers.values())] == [{200}, {200}], answers
        assert second.process.poll() is None


async def is_refused_past_its_limit(front: Proxied) -> None:
    async with front.client() as client:
        client.headers["Authorization"] = f"Bearer {front.proxy}-key"
        answers = [await client.post("/v1/embeddings", json=BODY) for _ in range(3)]  # two servers take one each
    assert answers[2].status_code == 429
    assert int(answers[2].headers["retry-after"]) > 1
    assert answers[2].json()["error"]["type"] == "RateLimitError"


@pytest.mark.slow
async def test_while_no_server_is_ready_clients_are_told_so(tmp_path: Path, scripted_folder: Path):
    os.mkfifo(tmp_path / "loading")
    env = {"SCRIPT_LOADING": str(tmp_path / "loading")}
    async with proxied(tmp_path, scripted_folder, env=env, wait_ready=False) as fronts:
        for front in fronts:
            async with front.client() as client:
                for _ in range(4):
                    answer = await client.post("/v1/embeddings", json=BODY)
                    assert answer.status_code == 503
                    assert answer.json()["error"]["type"] == "ServiceUnavailableError"
                    assert int(answer.headers["retry-after"]) == 5
