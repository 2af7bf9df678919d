"""The load generator whose requests do not wait for one another counts how each of them ended."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from benchmarks.open_loop import OpenLoopJob, counts, merged, run_open_loop
from trio_pool_serve.load.client_connection import CUT, NO_CONNECTION, RESET, TIMEOUT

ANSWER = b"HTTP/1.1 %s\r\ncontent-length: 2\r\n%s\r\nok"

LINGER_0 = b"\1\0\0\0\0\0\0\0"


@contextmanager
def serving(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """Accept connections in a thread until the block is left; gives the port."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        kept = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                kept.append(connection)
                connection.recv(65536)
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in kept:
            connection.close()


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)
    connection.close()


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (lambda connection: connection.sendall(ANSWER % (b"200 OK", b"")), "200"),
        (lambda connection: connection.sendall(ANSWER % (b"429 Busy", b"Retry-After: 1\r\n")), "429"),
        (lambda connection: connection.close(), CUT),
        (
            lambda connection: (
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok") or connection.close()
            ),
            CUT,
        ),
        (reset, RESET),
        (lambda connection: None, TIMEOUT),
    ],
    ids=["answered", "refused", "closed", "cut off", "reset", "silent"],
)
async def test_each_request_is_counted_by_how_it_ended(answer, outcome):
    with serving(answer) as port:
        result = await run_open_loop(OpenLoopJob(port=port, bodies=["{}"], per_s=50, seconds=0.2, timeout_s=0.5))
    assert counts(result) == {outcome: 10}
    assert result.offered == result.wanted == 10
    assert result.without_retry_after == 0
    assert result.goodput == (50 if outcome == "200" else 0)


async def test_a_port_at_which_nobody_listens_is_no_connection():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    result = await run_open_loop(OpenLoopJob(port=port, per_s=50, seconds=0.1))
    assert counts(result) == {NO_CONNECTION: 5}


async def test_a_refusal_without_retry_after_is_noticed():
    with serving(lambda connection: connection.sendall(ANSWER % (b"429 Busy", b""))) as port:
        result = await run_open_loop(OpenLoopJob(port=port, per_s=50, seconds=0.1))
    assert result.without_retry_after == 5
    both = merged([result, copied(result)])
    assert both.without_retry_after == 10
    assert both.count("429") == 10


def copied(result):
    """A result of the same numbers that shares no list with it."""
    import msgspec

    return msgspec.json.decode(msgspec.json.encode(result), type=type(result))
