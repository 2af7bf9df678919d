"""Frames of rows or answers: parts that are encoded separately, so that one which cannot be sent or read fails alone.

What has everything in common but its number is one part; how much can be one part is found by trying: see
``frames_of``. The frame's payload has the arrays in the order of the parts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from attrs import define, field

from trio_pool_serve.engine.remote.arrays import Received, encode
from trio_pool_serve.engine.remote.wire import FULL_FRAME_ROWS, Outputs, Part, Rows
from trio_pool_serve.processes.framed_stream import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, Buffer

T = TypeVar("T")

FULL_FRAME_BYTES = 2**20
"""A frame with this many bytes of arrays, or with ``FULL_FRAME_ROWS``, is sent before more are added to it: the
receiver can begin, and no more is copied at once."""

MAX_PART_BYTES = MAX_HEADER_BYTES // FULL_FRAME_ROWS // 2
"""Of a part without its arrays and what is of each row alone, so that a full frame's parts fit into a header."""

BYTES_OF_ROW = 256
"""Most bytes of a part that are of one row alone: numbers of up to nine bytes."""


@define(eq=False)
class Frame:
    """Rows or answers that are sent together, with their arrays."""

    parts: list[Part] = field(init=False, factory=list)
    buffers: list[Buffer] = field(init=False, factory=list)
    _rows: int = field(init=False, default=0)
    _nbytes: int = field(init=False, default=0)

    def add(self, ids: list[int], content: Rows | Outputs) -> None:
        """Add rows or their outcome. Raises what msgspec raises, and ``ValueError`` for a part that is too large."""
        buffers: list[Buffer] = []
        encoded = encode(content, buffers)
        nbytes = sum(map(len, buffers))
        if len(encoded) > _most_bytes(len(ids)) or nbytes > MAX_PAYLOAD_BYTES - FULL_FRAME_BYTES:
            raise ValueError(f"{len(encoded)} and {nbytes} bytes are too many")
        self.parts.append(Part(ids, nbytes, msgspec.Raw(encoded)))
        self.buffers += buffers
        self._rows += len(ids)
        self._nbytes += nbytes

    @property
    def is_full(self) -> bool:
        """Whether it is sent before more is added."""
        return self._rows >= FULL_FRAME_ROWS or self._nbytes >= FULL_FRAME_BYTES


def frames_of(
    groups: Iterable[Sequence[tuple[int, T]]],
    content_of: Callable[[list[T]], Rows | Outputs],
    refuse: Callable[[Frame, int, Exception], None],
    divide: Callable[[Sequence[tuple[int, T]]], Sequence[Sequence[tuple[int, T]]]],
) -> Iterator[Frame]:
    """Yield frames with numbered rows or outcomes: each group in as few parts as possible, divided where need be.

    ``refuse`` is called with the number of one that cannot be sent, even alone, and with the error.
    """
    frame = Frame()
    for group in groups:
        left = [group[begin : begin + FULL_FRAME_ROWS] for begin in reversed(range(0, len(group), FULL_FRAME_ROWS))]
        while left:
            together = left.pop()
            try:
                frame.add([number for number, _ in together], content_of([each for _, each in together]))
            except Exception as error:  # fields of params may be of any type, and heads may return anything
                if len(together) > 1:
                    left += reversed(divide(together))
                else:
                    refuse(frame, together[0][0], error)
            if frame.is_full:
                yield frame
                frame = Frame()
    if frame.parts:
        yield frame


def halves(group: Sequence[T]) -> Sequence[Sequence[T]]:
    """Return both halves: one of the rows may be guilty, or they are too many."""
    middle = len(group) // 2
    return group[:middle], group[middle:]


def reason_of(error: Exception) -> str:
    """Return an error's class and message, whatever reading the message does."""
    return f"{type(error).__name__}: {message_of(error)}"


def message_of(error: Exception) -> str:
    """Return an error's message, whatever reading it does."""
    try:
        return str(error)
    except Exception:  # a plugin's class
        return "its message cannot be read"


def _most_bytes(rows: int) -> int:
    """Return how many bytes a part with ``rows`` rows may have, without its arrays."""
    return MAX_PART_BYTES + BYTES_OF_ROW * (rows - 1)


def require_one_part(rows: int, nbytes: int) -> None:
    """Raise ``ValueError`` if rows with ``nbytes`` bytes of arrays are too many for one part: one row never is."""
    if rows > 1 and nbytes > FULL_FRAME_BYTES:
        raise ValueError(f"{rows} rows with {nbytes} bytes are too many for one part")


@define(eq=False)
class ReceivedPart(Received):
    """A part of a frame, and its bytes of the payload."""

    ids: list[int]

    def decode(self, kind: Any) -> Any:
        """Return the content. Raises ``ValueError``, too, if it is larger than any that is sent: it takes seconds."""
        nbytes = memoryview(self.content).nbytes
        if nbytes > _most_bytes(len(self.ids)):
            raise ValueError(f"{nbytes} bytes for {len(self.ids)} rows are too many")
        return super().decode(kind)


def received_parts(parts: Sequence[Part], payload: memoryview) -> Iterator[ReceivedPart]:
    """Yield the parts of a frame."""
    begin = 0
    for part in parts:
        yield ReceivedPart(part.content, payload[begin : begin + part.nbytes], part.ids)
        begin += part.nbytes
