"""Clients that are slow, many or greedy, at the listener of `trio-pool-serve serve`."""

import errno
import os
import resource
import socket
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from ipaddress import ip_network

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.scarcity import open_files
from tests.server.served_app import app, connect, served_app, served_on
from tests.server.server_process import ENGINE_PROCESS, SCRIPTED, launched, until
from trio_pool_serve.access.client_labels import ClientLabels
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.server import acceptor
from trio_pool_serve.server.listening_socket import open_listening_socket, raise_file_limit, refuse_rest
from trio_pool_serve.server.server_context import Connections

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def serving(**limits) -> AsyncIterator[tuple[socket.socket, Connections]]:
    connections = Connections(**limits)
    async with served_app(app, connections) as listening:
        yield listening, connections


async def answer_of(stream: trio.SocketStream) -> bytes:
    with trio.fail_after(200):
        return b"".join([part async for part in stream])


async def ask(stream: trio.SocketStream) -> bytes:
    await stream.send_all(REQUEST)
    with trio.fail_after(10):
        return await stream.receive_some()


@pytest.mark.parametrize("answered_before", [0, 1])
async def test_a_head_that_does_not_end_in_time_is_408(answered_before, autojump_clock):
    async with serving(client_timeout_s=30) as (listening, _), await connect(listening) as stream:
        for _ in range(answered_before):
            assert (await ask(stream)).startswith(b"HTTP/1.1 200")
        await trio.sleep(50)
        began = trio.current_time()
        for byte in REQUEST[:20]:
            await stream.send_all(bytes([byte]))
            await trio.sleep(1)
        assert (await answer_of(stream)).startswith(b"HTTP/1.1 408")
        assert trio.current_time() - began == pytest.approx(30, abs=2)


async def test_a_connection_without_a_request_is_closed_in_silence(autojump_clock):
    async with serving(client_timeout_s=30) as (listening, _), await connect(listening) as stream:
        assert await answer_of(stream) == b""


async def test_connections_above_the_limit_are_503_and_the_others_go_on():
    refused: list[bool] = []
    async with serving(max_connections=2, on_refusal=lambda: refused.append(True)) as (listening, connections):
        async with await connect(listening) as first, await connect(listening, "127.0.0.2") as second:
            assert (await ask(first)).startswith(b"HTTP/1.1 200")
            assert (await ask(second)).startswith(b"HTTP/1.1 200")
            async with await connect(listening, "127.0.0.3") as third:
                refusal = await answer_of(third)
            assert refusal.startswith(b"HTTP/1.1 503 \r\ncontent-length: 0\r\nretry-after: 1\r\n")
            assert (connections.open, refused) == (2, [True])
            assert (await ask(first)).startswith(b"HTTP/1.1 200")
        await until(lambda: not connections.open)
        async with await connect(listening) as fourth:
            assert (await ask(fourth)).startswith(b"HTTP/1.1 200")


async def test_connections_that_wait_together_are_counted_one_by_one():
    """The first turn accepts all of them."""
    async with serving(max_connections=2) as (listening, connections), AsyncExitStack() as clients:
        server = listening.getsockname()[:2]
        waiting = [socket.create_connection(server, source_address=(f"127.0.0.{1 + each}", 0)) for each in range(6)]
        answers = []
        for made in waiting:
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(made))
            answers.append((await ask(await clients.enter_async_context(stream)))[9:12])
        assert answers == [b"200"] * 2 + [b"503"] * 4
        assert connections.open == 2


async def test_an_address_has_half_of_the_connections_and_a_trusted_proxy_all():
    """Others can always connect, whatever one address does; a proxy connects for many clients."""
    labels = ClientLabels((ip_network("127.0.5.0/24"),))
    async with serving(max_connections=4, labels=labels) as (listening, connections), AsyncExitStack() as clients:

        async def status(address: str) -> bytes:
            return (await ask(await clients.enter_async_context(await connect(listening, address))))[9:12]

        assert [await status("127.0.0.1") for _ in range(3)] == [b"200", b"200", b"503"]
        assert [await status("127.0.5.1") for _ in range(2)] == [b"200", b"200"]
        await clients.aclose()
        await until(lambda: not connections.open)
        assert [await status("127.0.5.1") for _ in range(4)] == [b"200"] * 4


async def test_refused_connections_are_closed_after_a_second_whatever_their_clients_do(autojump_clock):
    async with serving(max_connections=1) as (listening, _), AsyncExitStack() as clients:
        await ask(await clients.enter_async_context(await connect(listening)))
        before = open_files()
        for _ in range(20):
            refused = await clients.enter_async_context(await connect(listening))
            assert (await refused.receive_some()).startswith(b"HTTP/1.1 503")
        assert open_files() > before + 20
        await trio.sleep(1.1)
        assert open_files() == before + 20, "the clients' own"


async def test_refused_connections_have_a_limit_of_their_own():
    async with serving(max_connections=1, max_refused=4) as (listening, _), AsyncExitStack() as clients:
        await ask(await clients.enter_async_context(await connect(listening)))
        before = open_files()
        for _ in range(20):
            assert (await answer_of(await clients.enter_async_context(await connect(listening)))).startswith(
                b"HTTP/1.1 503"
            )
        assert open_files() <= before + 20 + 4


@pytest.mark.parametrize(("files", "for_connections"), [(64, 32), (128, 64), (1024, 768), (20_000, 4096 + 256)])
async def test_the_server_keeps_files_in_reserve_for_itself(service, files, for_connections):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, limits[1]))
        made = Connections.of(service)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert made.max_connections + made.max_refused == for_connections
    assert made.max_refused >= for_connections // 20


async def test_with_few_files_all_are_answered_and_a_killed_engine_is_replaced(tmp_path, scripted_folder):
    """500 clients with half a head each, where the server may open 128 files."""
    command = ["prlimit", "--nofile=128:128", *SCRIPTED]
    options = ("--engine", "process", "--replicas", "1")
    async with (
        launched(tmp_path, str(scripted_folder), *options, command=command) as server,
        AsyncExitStack() as clients,
    ):
        for number in range(500):
            address = f"127.0.1.{1 + number % 100}"
            made = await trio.open_tcp_stream("127.0.0.1", server.port, local_address=address)
            stream = await clients.enter_async_context(made)
            with suppress(trio.BrokenResourceError):
                await stream.send_all(REQUEST[:10])
        for _ in range(20):
            async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
                assert (await ask(stream)).startswith(b"HTTP/1.1 503")
        (engine,) = server.processes(ENGINE_PROCESS)
        engine.kill()
        await server.wait_logged("is ready", times=2)
        await clients.aclose()
        await server.wait_computing()


async def test_without_file_descriptors_the_listener_waits_and_goes_on(caplog):
    async with serving() as (listening, _), await connect(listening) as before:
        assert (await ask(before)).startswith(b"HTTP/1.1 200")
        client = trio.socket.socket()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, limits[1]))
            await client.connect(listening.getsockname())
            await until(lambda: "no connection can be accepted" in caplog.text)
            assert os.strerror(errno.EMFILE) in caplog.text
            assert (await ask(before)).startswith(b"HTTP/1.1 200")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        async with trio.SocketStream(client) as stream:
            assert (await ask(stream)).startswith(b"HTTP/1.1 200")


class Refusing(socket.socket):
    """A listening socket on which the kernel passes on the errors of new connections, as accept(2) says."""

    errors: deque[int] | tuple[()] = ()

    def accept(self) -> tuple[socket.socket, object]:
        if self.errors:
            raise OSError(self.errors[0], os.strerror(self.errors.popleft()))
        return super().accept()


async def test_connections_go_on_when_a_new_one_has_an_error_before_it_is_accepted(caplog, monkeypatch):
    """These are the errors of Linux; a firewall or security module refuses with the first two."""
    monkeypatch.setattr(acceptor, "ERROR_PAUSE_S", 0.001)
    own = [errno.EPERM, errno.EACCES, errno.EPROTO, errno.ENOPROTOOPT, errno.EOPNOTSUPP]
    of_network = [errno.ENETDOWN, errno.EHOSTDOWN, errno.ENONET, errno.EHOSTUNREACH, errno.ENETUNREACH]
    with open_listening_socket(NetworkConfig(port=0)) as opened, Refusing(fileno=opened.detach()) as listening:
        async with served_on(listening, app, Connections()), await connect(listening) as before:
            assert (await ask(before)).startswith(b"HTTP/1.1 200")
            listening.errors = deque(own + of_network)
            async with await connect(listening) as stream:
                assert (await ask(stream)).startswith(b"HTTP/1.1 200")
            assert not listening.errors
            assert caplog.text.count("no connection can be accepted") == len(own + of_network)
            assert (await ask(before)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 8300), 414),
        (b"GET / HTTP/1.1\r\nHost: x\r\n%b\r\n" % (b"a: b\r\n" * 100), 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\na: %b\r\n\r\n" % (b"a" * 16_384), 431),
        (b"GET /%b HTTP/1.1\r\nHost: x\r\n%b\r\n" % (b"a" * 8000, b"a: b\r\n" * 99), 200),
    ],
)
async def test_long_targets_and_many_headers_are_refused(head, status):
    async with serving() as (listening, _), await connect(listening) as stream:
        await stream.send_all(head)
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 %d" % status)


async def test_connections_that_nobody_accepts_any_more_are_refused():
    with open_listening_socket(NetworkConfig(port=0)) as listening:
        async with await connect(listening) as stream:
            await stream.send_all(REQUEST)
            await wait_all_tasks_blocked()
            refuse_rest(listening, is_plain=True)
            assert (await answer_of(stream)).startswith(b"HTTP/1.1 503")


async def test_requests_on_one_connection_leave_others_their_turn():
    """Each of these is answered without waiting."""
    async with serving() as (listening, _), await connect(listening) as greedy, await connect(listening) as other:
        await greedy.send_all(REQUEST * 500)
        assert (await ask(other)).startswith(b"HTTP/1.1 200")
        with trio.fail_after(30):
            received = b""
            while received.count(b"HTTP/1.1 200") < 500:
                received += await greedy.receive_some()


def test_the_limit_of_files_is_raised_as_far_as_allowed():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0] - 1, limits[1]))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limits[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
