"""Decodes clients' token embeddings: base64 of a file with one matrix.

Long operations release the interpreter lock or run in pieces, so other requests proceed while a hundred megabytes are
decoded.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pybase64
from attrs import frozen

from trio_pool_serve.errors import ContextLengthError, EmptyInputError
from trio_pool_serve.prompts import EmbedsPrompt, RenderingParams
from trio_pool_serve.rendering.stored_tensor import (
    ITEM_BYTES,
    StoredDtype,
    StoredTensor,
    read_tensor,
    refused,
    require_tensor,
)
from trio_pool_serve.types import RenderedPrompt

DECODE_CHUNK_CHARACTERS = 256 * 1024
"""Characters of base64 decoded per call; a multiple of four."""

COPY_CHUNK_NUMBERS = 2**18
"""Numbers copied per call."""

EXPONENTS: dict[StoredDtype, int] = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000}
"""Exponent bits: all are set in infinities and NaN."""

MAX_FILE_OVERHEAD = 64 * 1024
"""Maximum bytes of a file in addition to its numbers."""


@frozen
class EmbedsFormat:
    """The matrices that a model accepts: ``width`` columns, and up to ``max_rows`` rows, the maximum of tokens."""

    width: int
    max_rows: int

    @property
    def max_bytes(self) -> int:
        """Maximum size of a file: the longest matrix in float32, and its header."""
        return self.max_rows * self.width * 4 + MAX_FILE_OVERHEAD

    def estimated_tokens(self, prompt: EmbedsPrompt) -> int:
        """Return an upper bound of the rows, for admission: as many as fit the payload and the model."""
        return min(self.max_rows, len(prompt.payload) * 3 // 4 // (min(ITEM_BYTES.values()) * self.width))

    def render(self, prompt: EmbedsPrompt, params: RenderingParams) -> RenderedPrompt:
        """Return the model input: embeds of shape (tokens, width), truncated as tokens are.

        Raises ``ContextLengthError`` for too many rows and ``InvalidRequestError`` for anything but base64 of one
        finite float matrix of the model's width.
        """
        tensor = read_tensor(self._decode(prompt.payload))
        require_tensor(
            len(tensor.shape) == 2,
            f"The tensor has {len(tensor.shape)} dimensions; it must have 2: tokens and hidden size.",
        )
        rows, width = tensor.shape
        require_tensor(
            width == self.width, f"The tensor is {width} wide, but this model's token embeddings are {self.width} wide."
        )
        if rows == 0:
            raise EmptyInputError("The tensor has no rows.", field="prompts")
        keep = rows if params.truncate_to is None else min(rows, params.truncate_to)
        if tensor.nbytes > self.max_bytes or keep > self.max_rows:
            raise self._too_long(f"{rows} rows")
        first = rows - keep if params.truncation_side == "left" else 0
        return RenderedPrompt(np.zeros(keep, dtype=np.int32), embeds=_finite_rows(tensor, first, first + keep))

    def _decode(self, payload: bytes | memoryview) -> npt.NDArray[np.uint8]:
        """Return the bytes (uint8, one dimension) of strict base64."""
        if not len(payload):
            raise EmptyInputError("There is no tensor.", field="prompts")
        size = max(0, len(payload) // 4 * 3 - bytes(payload[-2:]).count(b"="))
        if size > self.max_bytes:
            raise self._too_long(f"{size} bytes")
        # numpy uses huge pages: freeing them takes a tenth of the time of bytes.
        decoded = np.empty(size, dtype=np.uint8)
        place = 0
        with memoryview(payload) as characters, decoded.data as out:
            for begin in range(0, len(characters), DECODE_CHUNK_CHARACTERS):
                try:
                    piece = pybase64.b64decode(characters[begin : begin + DECODE_CHUNK_CHARACTERS], validate=True)
                    out[place : place + len(piece)] = piece
                except ValueError as error:  # padding before the end yields too few bytes, or too many here
                    raise refused("The tensor is not valid base64.") from error
                place += len(piece)
        require_tensor(place == size, "The tensor is not valid base64.")
        return decoded

    def _too_long(self, length: str) -> ContextLengthError:
        return ContextLengthError(
            f"A tensor has {length}, but this model takes at most {self.max_rows} rows of {self.width} numbers.",
            field="prompts",
        )


def _finite_rows(tensor: StoredTensor, first: int, last: int) -> npt.NDArray[Any]:
    """Return a copy of rows in their stored dtype: float16, float32, or bfloat16 as uint16.

    The forward pass converts them, so prompts that wait in the queue take no more memory than necessary.
    """
    width, exponent = tensor.shape[1], EXPONENTS[tensor.dtype]
    rows = np.empty((last - first, width), dtype=tensor.rows(first, first).dtype)
    bits = rows.view(f"<u{rows.itemsize}")
    step = max(1, COPY_CHUNK_NUMBERS // width)
    for begin in range(0, last - first, step):
        end = min(begin + step, last - first)
        rows[begin:end] = tensor.rows(first + begin, first + end)
        require_tensor(
            not ((bits[begin:end] & exponent) == exponent).any(), "The tensor has numbers that are not finite."
        )
    return rows
