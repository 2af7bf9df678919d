"""A signal to stop while clients send requests: each one is answered, by 200 or 503, and none is reset."""

from collections import Counter

import pytest
import trio

from tests.server.server_process import ServerProcess, scripted, until

BODY = b'{"input": "hello"}'
HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(
    BODY
)


async def receive_answer(stream: trio.SocketStream) -> tuple[bytes, bool]:
    """Return the status of a whole answer and whether the connection ends behind it; nothing without an answer."""
    received = b""
    while True:
        head, end, body = received.partition(b"\r\n\r\n")
        if end:
            fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:])
            if len(body) == int(fields[b"content-length"]):
                return head[9:12], fields.get(b"connection") == b"close"
        more = await stream.receive_some()
        if not more:
            assert not received, "cut off"
            return b"", True
        received += more


async def ask_until_refused(server: ServerProcess, answers: Counter, *, keep: bool) -> None:
    """Send one request after the other, on one connection or on one for each, until no server listens any more."""
    while True:
        try:
            stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        except OSError:
            return
        async with stream:
            reused = False
            while True:
                try:
                    await stream.send_all(HEAD + BODY)
                    status, ends = await receive_answer(stream)
                except trio.BrokenResourceError:
                    # An idle connection may be closed at any time, so that a client asks again. A new one may not.
                    status, ends = (b"closed while idle" if reused else b"reset"), True
                if not status:
                    status = b"closed while idle" if reused else b"not answered"
                answers[status.decode()] += 1
                if ends or not keep:
                    break
                reused = True


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--engine", "local"), ("--engine", "process"), ("--api-workers", "2")])
async def test_every_request_is_answered(tmp_path, scripted_folder, arguments):
    async with scripted(tmp_path, scripted_folder, "--replicas", "1", *arguments) as server:
        answers: Counter[str] = Counter()
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for number in range(8):
                    nursery.start_soon(lambda keep: ask_until_refused(server, answers, keep=keep), bool(number % 2))
                await until(lambda: answers["200"] >= 200)
                server.signal()
        assert await server.wait_exit() == 0
        assert answers["not answered"] == answers["reset"] == 0, answers
        assert answers["closed while idle"] <= 8, answers
        assert "took too long" not in server.log
