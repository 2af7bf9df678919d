"""A client of HTTP/2 that sends what it is told to."""

from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import trio


class Client:
    """A client over a stream; with a ``window`` of 0 it lets no body of a response through."""

    def __init__(self, stream: trio.SocketStream, window: int | None = None) -> None:
        self.stream = stream
        self.protocol = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.protocol.initiate_connection()
        if window is not None:
            self.protocol.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.events: list[h2.events.Event] = []

    async def send(self, data: bytes = b"") -> None:
        await self.stream.send_all(self.protocol.data_to_send() + data)

    def begin(self, path: str = "/", method: str = "GET", *more: tuple[str, str], ends: bool = True) -> int:
        """Return the number of a request that the next ``send`` sends."""
        number = self.protocol.get_next_available_stream_id()
        fields = [(":method", method), (":path", path), (":authority", "x"), (":scheme", "http"), *more]
        self.protocol.send_headers(number, fields, end_stream=ends)
        return number

    async def post(self, body: bytes, *more: tuple[str, str]) -> int:
        """Send a body to ``/v1/embeddings``, and return the number of the request."""
        number = self.begin("/v1/embeddings", "POST", ("content-type", "application/json"), *more, ends=False)
        self.protocol.send_data(number, body, end_stream=True)
        await self.send()
        return number

    async def event(self, kind: type, stream: int | None = None) -> Any:
        """Return the first event of a kind, perhaps of a stream; raises ``EOFError`` at the connection's end."""
        with trio.fail_after(30):
            while True:
                for event in self.events:
                    if isinstance(event, kind) and (stream is None or event.stream_id == stream):
                        self.events.remove(event)
                        return event
                if not (received := await self.stream.receive_some()):
                    raise EOFError
                self.events += self.protocol.receive_data(received)
                await self.send()

    async def status(self, number: int) -> bytes:
        """Return the status of a response once its head has arrived."""
        return dict((await self.event(h2.events.ResponseReceived, number)).headers)[b":status"]

    async def get(self, path: str = "/") -> None:
        """Send a request, and wait for the end of its response."""
        number = self.begin(path)
        await self.send()
        await self.event(h2.events.StreamEnded, number)
