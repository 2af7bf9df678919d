"""HTTP/2: hypercorn's protocol over h2, in turns with other connections, and closed if it wastes their time."""

import time
from collections import Counter
from contextlib import suppress
from typing import Any

import trio
from h2.errors import ErrorCodes
from h2.events import DataReceived, PriorityUpdated, RequestReceived, StreamReset
from h2.events import Event as H2Event
from h2.exceptions import FrameTooLargeError, ProtocolError
from h2.frame_buffer import FrameBuffer
from h2.settings import SettingCodes
from h2.stream import StreamState
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import StreamClosed
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.utils import filter_pseudo_headers
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    RstStreamFrame,
    SettingsFrame,
)

from trio_pool_serve.api.http.overload import EarlyResponse
from trio_pool_serve.server.frame_budget import BYTES_PER_FRAME, PER_REQUEST, UNCOUNTED, FrameBudget
from trio_pool_serve.server.incoming_request import MAX_HEADERS, MAX_TARGET, asgi_scope

TURN_S = 0.0005
"""Time of the event loop for the frames of one connection that have arrived."""

REQUEST_S = TURN_S / 2
"""Time of a turn that each request counts for: it uses the event loop afterwards."""

PAUSE_S = 0.05
"""Pause between the turns of a connection that has exceeded its budget, or whose address has."""

SMALL_DATA = 1024
"""Frames of data for an answered request are wasted if they have fewer bytes; else they are the rest of its body."""

TINY_DATA = 4
"""Frames of a request's body count until it is answered if they have fewer bytes, but for the last."""

TINY_COST = 4
"""Frames that a tiny frame counts for: it wakes the tasks of its request."""

MAX_HEAD = 16 * 1024
"""Maximum bytes of a request's head, as over HTTP/1.1; for HPACK's form and for the decoded headers."""

USUAL_HEAD = 4 * 1024
"""Bytes of a head in HPACK's form that cost nothing. Reading Huffman's code takes 0.2 to 0.3 ms for each KiB."""

HEAD_BYTES_PER_FRAME = 512
"""Bytes above ``USUAL_HEAD`` that count as a frame that brings nothing: a completed request makes up for 9 KiB."""

MAX_SETTINGS = 32
"""Entries of a SETTINGS frame, as in nghttp2."""

MAX_TABLE = 4096
"""Bytes of HPACK's table for response headers, of which the client may allow more: it is searched in Python."""


NO_ROOM: EarlyResponse = 503, [(b"retry-after", b"1")], b""
"""The response to a request above the number that an address, or all of them, may have in progress."""


KNOWN_SETTINGS = frozenset(SettingCodes)


class SingleFrames(FrameBuffer):
    """h2's buffer, from which it takes one frame each time that it receives data.

    h2 gets no settings that it does not know, which it would keep, and no client's GOAWAY without an error, after which
    it would send nothing more: the client begins no more requests, and reads the responses to its earlier requests.
    """

    def __init__(self) -> None:
        super().__init__(server=True)
        self.taken: Frame | None = None

    def __next__(self) -> Frame:
        """Return the next frame, unless one was taken; raises ``FrameTooLargeError`` before it has arrived."""
        if self.taken is not None:
            raise StopIteration
        if len(self._data) >= 4:  # a frame begins with its length and its type
            self._check_length(int.from_bytes(self._data[:3]), self._data[3])
        frame = self.taken = super().__next__()
        if isinstance(frame, SettingsFrame):
            frame.settings = {code: value for code, value in frame.settings.items() if code in KNOWN_SETTINGS}
            if (size := frame.settings.get(SettingCodes.HEADER_TABLE_SIZE)) is not None:
                frame.settings[SettingCodes.HEADER_TABLE_SIZE] = min(size, MAX_TABLE)
        if isinstance(frame, GoAwayFrame) and frame.error_code == ErrorCodes.NO_ERROR:
            raise StopIteration
        return frame

    def _check_length(self, length: int, kind: int) -> None:
        self._validate_frame_length(length)
        if kind == SettingsFrame.type and length > 6 * MAX_SETTINGS:
            raise FrameTooLargeError(f"more than {MAX_SETTINGS} settings")
        if kind == ContinuationFrame.type and length + sum(len(part.data) for part in self._headers_buffer) > MAX_HEAD:
            raise FrameTooLargeError(f"a head of more than {MAX_HEAD} bytes")


class Http2Protocol(H2Protocol):
    """hypercorn's protocol with turns and budgets: by itself it takes a whole read at once, and counts nothing.

    Frames are taken one by one, and other tasks have their turn after each ``TURN_S``, half of which a request counts
    for. Frames that bring nothing are counted by connection and by address; completed requests and sent responses make
    up for them.
    Past the budget the client gets GOAWAY: running requests are answered, new ones are not. Requests without
    the API key that they need, and requests for which there is no room, are answered without a task.

    ``app`` is the ``ContainedConnection``.
    """

    app: Any

    def __init__(self, app: Any, *args: Any) -> None:
        super().__init__(app, *args)
        self._frames = self.connection.incoming_buffer = SingleFrames()
        self.connection.local_settings[SettingCodes.ENABLE_CONNECT_PROTOCOL] = 0
        self.connection.local_settings.acknowledge()  # not sent yet: it is in the first frame
        self._budget = FrameBudget()
        self._requests = self._resets = 0
        self._tiny: Counter[int] = Counter()
        """Frames that the bodies of requests in progress have spent."""
        self._is_going_away = False

    async def initiate(self, *args: Any) -> None:
        """Begin; the first request must begin in time. Cancellation: as in hypercorn."""
        await self.app.expect_first_request()
        await super().initiate(*args)

    async def handle(self, event: Event) -> None:
        """Handle the data that have arrived, frame by frame. Cancellation: at once, between turns."""
        if not isinstance(event, RawData):
            await super().handle(event)
            return
        data, until = event.data, 0.0
        while not self.closed:
            if time.perf_counter() > until:
                await self._wait_for_turn()
                until = time.perf_counter() + TURN_S
            self._frames.taken = None
            await super().handle(RawData(data))
            frame, data = self._frames.taken, b""
            if frame is None:
                return
            await self._count(frame)
            if "END_STREAM" in frame.flags:
                until -= REQUEST_S

    async def _wait_for_turn(self) -> None:
        if self.app.client_has_left:
            self.app.stop_reading()
        await trio.sleep(PAUSE_S if self._is_going_away or self.app.address_budget.is_exceeded else 0)

    async def _count(self, frame: Frame) -> None:
        """Count a frame if it brings nothing; past the budget, begin to close the connection."""
        if isinstance(frame, HeadersFrame):
            wasted = max(0, len(frame.data) - USUAL_HEAD) / HEAD_BYTES_PER_FRAME
        elif isinstance(frame, DataFrame):
            is_open = frame.stream_id in self.streams
            least, cost = (TINY_DATA, TINY_COST) if is_open else (SMALL_DATA, 1)
            is_last = is_open and "END_STREAM" in frame.flags
            wasted = cost if len(frame.data) < least and not is_last else 0
            if is_open and wasted:
                self._tiny[frame.stream_id] += wasted
        elif isinstance(frame, RstStreamFrame):
            self._resets += 1
            wasted = 2 * self._resets > self._requests  # proxies cancel often
        else:
            wasted = True
        if wasted:
            await self._spend(wasted)

    async def _spend(self, frames: float) -> None:
        shared = self.app.address_budget
        self._budget.spend(frames)
        shared.spend(frames)
        if self._budget.is_exceeded or (shared.is_exceeded and self._budget.wasted > UNCOUNTED):
            if not self._is_going_away:
                await self._reset_unfinished()
            await self.go_away(ErrorCodes.ENHANCE_YOUR_CALM)

    async def _reset_unfinished(self) -> None:
        """Reset the requests whose bodies have not arrived: the connection would wait for them."""
        for number, stream in [*self.connection.streams.items()]:
            if number in self.streams and stream.state_machine.state == StreamState.OPEN:
                self.connection.reset_stream(number, ErrorCodes.ENHANCE_YOUR_CALM)
                await self._handle_events([StreamReset(stream_id=number)])

    async def go_away(self, reason: ErrorCodes) -> None:
        """Begin to close the connection: the requests so far are answered. Cancellation: at once."""
        if not self._is_going_away and not self.closed:
            self._is_going_away = True
            last = GoAwayFrame(0, self.connection.highest_inbound_stream_id, reason)
            await self.send(RawData(last.serialize()))  # h2 would send nothing more after its own
            await self._close_if_done()

    async def _close_if_done(self) -> None:
        if self._is_going_away and not self.streams and not self.stream_buffers:
            await self._flush()
            await self.send(Closed())

    async def stream_send(self, event: StreamEvent) -> None:
        """Send a part of a response, or reset one that the app leaves incomplete. Cancellation: as in hypercorn."""
        if not isinstance(event, StreamClosed) or event.stream_id not in self.streams:  # the client has reset it
            await super().stream_send(event)
            return
        unsent = self.stream_buffers.get(event.stream_id)
        if unsent is None or unsent.complete:
            self._earn(PER_REQUEST + self._tiny[event.stream_id])
        else:
            with suppress(ProtocolError):  # the connection has ended
                self.connection.reset_stream(event.stream_id, ErrorCodes.INTERNAL_ERROR)
        await super().stream_send(event)
        await self._flush()
        await self._close_if_done()

    async def _send_data(self, stream_id: int) -> None:
        """Send as much as the client's windows allow, the end with the last data: hypercorn writes a frame for each."""
        buffer = self.stream_buffers[stream_id]
        try:
            room = min(self.connection.local_flow_control_window(stream_id), self.connection.max_outbound_frame_size)
            data = await buffer.pop(max(0, room))
            is_over = buffer.complete
            if data or is_over:
                self.connection.send_data(stream_id, data, end_stream=is_over)
                await self._flush()
            else:
                self.priority.block(stream_id)
        except ProtocolError:  # the stream or the connection has ended
            is_over = True
            await buffer.close()
        if is_over:
            del self.stream_buffers[stream_id]
            self.priority.remove_stream(stream_id)
            await self._close_if_done()

    def _earn(self, frames: float) -> None:
        self._budget.earn(frames)
        self.app.address_budget.earn(frames)

    async def _flush(self) -> None:
        if data := self.connection.data_to_send():
            self._earn(len(data) / BYTES_PER_FRAME)
            await self.send(RawData(data))

    async def _handle_events(self, events: list[H2Event]) -> None:
        for event in events:
            if isinstance(event, PriorityUpdated):
                continue  # RFC 9113 deprecates it; hypercorn keeps a tree, which can fail
            if isinstance(event, DataReceived) and event.stream_id not in self.streams:
                # Of a request that was answered early: the client goes on sending until it reads that.
                self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                continue
            if isinstance(event, RequestReceived):
                self._requests += 1
                if await self._is_refused(event):
                    continue
                self.keep_alive_requests = 0  # hypercorn would end the connection with running requests
            await super()._handle_events([event])
        if self._requests >= self.config.keep_alive_max_requests:
            await self.go_away(ErrorCodes.NO_ERROR)
        await self._flush()

    async def _is_refused(self, event: RequestReceived) -> bool:
        """Return whether a request is not handled; it has been answered then, or reset."""
        stream_id, fields = event.stream_id, dict(event.headers)
        method, target = fields[b":method"], fields.get(b":path", b"")
        if len(event.headers) > MAX_HEADERS:
            await self._spend(len(event.headers))
        if self._is_going_away or self.context.terminated.is_set() or not (method + target).isascii():
            # In a shutdown, GOAWAY comes last: h2's clients, httpx among them, read nothing after it.
            with suppress(ProtocolError):  # the connection has ended
                self.connection.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
            return True
        if (response := self._early_response(event, method, target)) is None:
            return False
        status, more, body = response
        if self.connection.local_flow_control_window(stream_id) < len(body):
            body, more = b"", [header for header in more if header[0] != b"content-length"]
        if method == b"HEAD":
            body = b""
        head = [(b":status", b"%d" % status), *more, *self.config.response_headers("h2")]
        self.connection.send_headers(stream_id, head, end_stream=not body)
        if body:
            self.connection.send_data(stream_id, body, end_stream=True)
        if not self.streams:
            for idle in (False, True):  # the connection is idle from now on
                await self.send(Updated(idle=idle))
        return True

    def _early_response(self, event: RequestReceived, method: bytes, target: bytes) -> EarlyResponse | None:
        """Return the response to a request that is not handled; ``None`` for others."""
        headers = filter_pseudo_headers(event.headers)
        if method.upper() == b"CONNECT":
            return 501, [], b""  # no tunnels; websockets are for HTTP/1.1
        if len(target) > MAX_TARGET:
            return 414, [], b""
        if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEAD:
            return 431, [], b""
        if (refusals := self.app.context.refusals) is not None:
            scheme = "https" if self.ssl else "http"
            scope = asgi_scope("2", method.decode(), scheme, target, headers, self.config.root_path, self.client)
            response: EarlyResponse | None = refusals.gate.answer_without_key(scope)
            if response is not None:
                return response
        return NO_ROOM if self.streams and self.app.context.connections.refuses(self.app.address) else None

    async def _create_stream(self, request: RequestReceived) -> None:
        await super()._create_stream(request)
        self.app.count_requests(len(self.streams))

    async def _close_stream(self, stream_id: int) -> None:
        # hypercorn keeps the buffers of cancelled requests
        if (unsent := self.stream_buffers.get(stream_id)) is not None:
            await unsent.close()
            self.priority.unblock(stream_id)
        self._tiny.pop(stream_id, None)
        await super()._close_stream(stream_id)
        self.app.count_requests(len(self.streams))
