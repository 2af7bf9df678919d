"""A ``multipart/form-data`` body with one file, of which only the fields are kept in memory."""

from attrs import Factory, define, field
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder, NeedData

from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.errors import InvalidRequestError, PayloadTooLargeError, UnsupportedMediaTypeError, require_request
from trio_pool_serve.rendering.memory_budget import in_units

FILE_FIELD = "file"

MAX_BUFFERED = 2 * 1024 * 1024
"""Bytes: a piece of the body, and the end of the piece before it if that may be part of a boundary or of headers."""

MAX_PARTS = 32

MAX_HELD = MAX_BUFFERED // 4

MAX_PADDING = 64
"""Bytes after a boundary: the end of the form, and blanks."""

MAX_FIELD_BYTES = 4096

MAX_BOUNDARY = 200
"""Characters; 70 by RFC 2046."""


def boundary_of(request: HttpRequest) -> bytes:
    """Return the boundary that a request declares. Raises ``UnsupportedMediaTypeError``, ``InvalidRequestError``."""
    kind, options = parse_options_header(request.header(b"content-type"))
    if kind.lower() != "multipart/form-data":
        raise UnsupportedMediaTypeError("Send the file as multipart/form-data.")
    boundary = options.get("boundary", "")
    require_request(0 < len(boundary) <= MAX_BOUNDARY and boundary.isascii(), "The Content-Type has no valid boundary.")
    return boundary.encode()


@define(eq=False)
class UploadForm:
    """The fields of a form, and where its file begins and ends in the body."""

    boundary: bytes
    max_file_bytes: int
    fields: dict[str, str] = field(init=False, factory=dict)
    filename: str | None = field(default=None, init=False)
    _decoder: MultipartDecoder = field(
        init=False,
        default=Factory(
            lambda self: MultipartDecoder(self.boundary, MAX_BUFFERED, max_parts=MAX_PARTS), takes_self=True
        ),
    )
    _part: str | None = field(default=None, init=False)
    """Name of the part that is being read; ``None`` in the file."""
    _value: bytearray = field(init=False, factory=bytearray)
    _file_bytes: int = field(default=0, init=False)
    _held: bytes = field(default=b"", init=False)

    def take(self, piece: bytes | None) -> list[bytes]:
        """Take a piece of the body, ``None`` at its end; return the parts of the file in it.

        Raises ``InvalidRequestError`` for a form that is not understood, and ``PayloadTooLargeError``.
        """
        found: list[bytes] = []
        try:
            if data := self._without_a_cut_boundary(piece):
                self._decode(data, found)
            if piece is None:
                self._decode(None, found)
        except RequestEntityTooLarge as error:
            raise InvalidRequestError("The form has too many parts, or headers that are too long.") from error
        except (
            ValueError,
            AttributeError,
        ) as error:  # ``AttributeError`` for a part without a line break after its headers
            raise InvalidRequestError(f"The form is not valid multipart/form-data: {error}.") from error
        return found

    def _decode(self, data: bytes | None, found: list[bytes]) -> None:
        self._decoder.receive_data(data)
        while not isinstance(event := self._decoder.next_event(), NeedData | Epilogue):
            if isinstance(event, File | Field):
                self._begin(event)
            elif isinstance(event, Data):
                self._take_data(event, found)

    def _without_a_cut_boundary(self, piece: bytes | None) -> bytes:
        """Return the data to decode now: nothing while it ends with a boundary that may go on.

        werkzeug 3.1 takes the CR in front of a boundary for data if its input ends just after it.
        """
        data, self._held = self._held + (piece or b""), b""
        tail = len(self.boundary) + MAX_PADDING
        if piece is None or len(data) > MAX_HELD:
            return data
        if b"--" + self.boundary in (bytes(self._decoder.buffer[-tail:]) + data[-tail:])[-tail:]:
            data, self._held = b"", data
        return data

    def _begin(self, event: File | Field) -> None:
        is_file = isinstance(event, File) and event.name == FILE_FIELD
        require_request(not is_file or self.filename is None, "The form has several files; send one.", param=FILE_FIELD)
        if isinstance(event, File) and is_file:
            self.filename = event.filename
        self._part, self._value = None if is_file else str(event.name), bytearray()

    def _take_data(self, event: Data, found: list[bytes]) -> None:
        if self._part is None:
            self._file_bytes += len(event.data)
            if self._file_bytes > self.max_file_bytes:
                raise PayloadTooLargeError(f"The file exceeds {in_units(self.max_file_bytes)}.")
            found.append(event.data)
            return
        self._value += event.data
        require_request(
            len(self._value) <= MAX_FIELD_BYTES,
            f"A field of the form exceeds {in_units(MAX_FIELD_BYTES)}.",
            param=self._part[:64],
        )
        if not event.more_data:
            self.fields[self._part] = self._value.decode()
