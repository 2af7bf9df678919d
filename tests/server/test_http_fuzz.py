"""Bytes that no well-behaved client sends, to a real server: it answers the others, and nothing is left behind."""

import random
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import trio

from tests.conftest import client_of
from tests.lanes import sampled
from tests.server.server_process import ServerProcess, scripted

CORPUS = Path(__file__).parent / "corpus" / "http.txt"
BODY = b'{"input": "hello"}'
SILENCE_S = 0.3
"""A server that has said nothing for this long waits for more; to stop waiting too early only loses a finding."""

AT_ONCE = 16


def cases() -> list[bytes]:
    lines = CORPUS.read_text().splitlines()
    escaped = [line.encode("ascii").decode("unicode_escape").encode("latin1") for line in lines if line[0] != "#"]
    return [case.replace(b"{N}", b"%d" % len(BODY)).replace(b"{B}", BODY) for case in escaped]


def mutated(seed: int, count: int) -> Iterator[bytes]:
    """Cases cut off, joined, and with bytes changed, doubled or dropped."""
    chance, known = random.Random(seed), cases()
    for _ in range(count):
        case = bytearray(chance.choice(known))
        for _ in range(chance.randrange(4)):
            place = chance.randrange(len(case))
            match chance.randrange(6):
                case 0:
                    del case[place:]
                case 1:
                    case[place] = chance.randrange(256)
                case 2:
                    case[place:place] = case[place : place + chance.randrange(40)]
                case 3:
                    del case[place : place + chance.randrange(1, 8)]
                case 4:
                    case += chance.choice(known)
                case _:
                    case[place:place] = chance.choice([b"\r\n", b"\0", b"\r\n\r\n", b" ", b"0", b"\xff", b",", b":"])
            if not case:
                case += b"\n"
        yield bytes(case)


async def send(server: ServerProcess, case: bytes, chance: random.Random) -> bytes:
    """Send a case in one piece or in two, perhaps close the sending half or leave; return what is said to it."""
    received, pieces = b"", chance.choice([[case], [case[: len(case) // 2], case[len(case) // 2 :]]])
    async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
        with suppress(trio.BrokenResourceError):
            for piece in pieces:
                await stream.send_all(piece)
            ending = chance.randrange(4)
            if ending == 0:
                return b""
            if ending == 1:
                await stream.send_eof()
            while True:
                with trio.move_on_after(SILENCE_S) as silence:
                    received += (more := await stream.receive_some())
                if silence.cancelled_caught or not more:
                    return received
    return received


async def check_that_others_are_served(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/embeddings", content=BODY, headers={"content-type": "application/json"})
    assert answer.status_code == 200


async def open_connections(client: httpx.AsyncClient) -> float:
    text = (await client.get("/metrics")).text
    (line,) = re.findall(r'^trio_pool_serve_connections\{of="open"\} (\S+)$', text, re.MULTILINE)
    return float(line)


async def check(server: ServerProcess, sent: list[bytes], seed: int) -> None:
    chance, failed = random.Random(seed), list[tuple[bytes, bytes]]()
    async with client_of(server.url) as client:
        for begin in range(0, len(sent), AT_ONCE):
            async with trio.open_nursery() as nursery:

                async def note(case: bytes) -> None:
                    answer = await send(server, case, chance)
                    if re.search(rb"HTTP/1.1 5(?!01)\d\d|:status.?5", answer):
                        failed.append((case, answer))

                for case in sent[begin : begin + AT_ONCE]:
                    nursery.start_soon(note, case)
            await check_that_others_are_served(client)
        assert failed == []
        with trio.fail_after(60):
            while await open_connections(client) > 1:  # noqa: ASYNC110  (another process has no event to wait for)
                await trio.sleep(0.02)
        load = (await client.get("/load")).json()
    assert load["server_load"] == 0
    assert [model["admitted_tokens"] for model in load["models"].values()] == [0]
    assert "listener crashed" not in server.log


@sampled(("seed", "count"), [(1, 150), (2, 2000)], keep=[(1, 150)])
async def test_hostile_bytes_hurt_no_one_else(tmp_path, scripted_folder, seed, count):
    arguments = (str(scripted_folder), "--engine", "local", "--client-timeout-s", "2")
    async with scripted(tmp_path, *arguments) as server:
        await check(server, [*(cases() if seed == 1 else ()), *mutated(seed, count)], seed)
        await server.drain()
