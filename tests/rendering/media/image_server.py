"""A server of images that does what it is told: what arrives is known to the byte."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio
from attrs import define, field

from tests.load.raw_server import listening

Answer = Callable[[trio.abc.Stream], Awaitable[None]]


def says(body: bytes, *headers: str, status: str = "200 OK", with_length: bool = True) -> Answer:
    """Answer with a body, whole."""
    lines = [f"HTTP/1.1 {status}", *headers, *([f"Content-Length: {len(body)}"] if with_length else [])]
    head = "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1")
    return lambda stream: stream.send_all(head + body)


def redirects(location: str, status: str = "302 Found") -> Answer:
    return says(b"", f"Location: {location}", status=status)


def drips(head: bytes, drop: bytes) -> Answer:
    """Answer with a beginning, and then with drops for ever."""

    async def answer(stream: trio.abc.Stream) -> None:
        await stream.send_all(head)
        while True:
            await stream.send_all(drop)
            await trio.sleep(0.001)

    return answer


async def never(stream: trio.abc.Stream) -> None:
    """Accept, and say nothing."""
    await trio.sleep_forever()


@define(eq=False)
class ImageServer:
    """Answers by path. ``heads`` are the requests as they came."""

    answers: dict[str, Answer]
    port: int = 0
    heads: list[str] = field(factory=list)

    def url(self, path: str, host: str = "127.0.0.1", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    async def handle(self, stream: trio.abc.Stream) -> None:
        async with stream:
            try:
                head = b""
                while b"\r\n\r\n" not in head:
                    received = await stream.receive_some()
                    if not received:
                        return
                    head += received
                self.heads.append(head.decode("latin-1"))
                await self.answers[head.split(b" ")[1].decode()](stream)
                # A client that is sent more than it wants resets the connection; one that still reads learns nothing.
                while await stream.receive_some():
                    pass
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass

    def header(self, name: str, head: int = -1) -> str | None:
        lines = (line.partition(": ") for line in self.heads[head].splitlines())
        return next((value for key, _, value in lines if key.lower() == name), None)


@asynccontextmanager
async def serving(answers: dict[str, Answer], ssl_context=None) -> AsyncIterator[ImageServer]:
    server = ImageServer(answers)
    async with listening(server.handle, ssl_context) as server.port:
        yield server
