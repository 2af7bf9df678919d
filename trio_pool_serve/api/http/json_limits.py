"""Limits on the values in a JSON body, counted before a parser makes an object of each.

A parser holds the interpreter lock until it is done, and so does freeing what it made: sixteen megabytes of
``[[1],[1],…`` take more than a second. Counting goes through the body in pieces, mostly without the lock.
"""

import numpy as np
from attrs import frozen

from trio_pool_serve.api.http.request_body import Buffer
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import InvalidRequestError

COUNTED_FROM = 256 * 1024
"""Bytes; a shorter body is parsed in a few milliseconds, whatever it holds."""

COUNTED_AT_ONCE = 256 * 1024

MAX_VALUES = 2**20
"""Most values of a body: 2048 inputs with 512 token ids each, say. Some twenty milliseconds."""

PER_INPUT = 32
"""Strings, and lists and objects, that a body may have for each input that it may have."""

QUOTE, COMMA, BRACKET, BRACE = b'",[{'


@frozen
class JsonLimits:
    """The most strings, lists and objects, and values of all kinds that a body may have."""

    inputs: int
    """Most inputs of a request."""
    values: int = MAX_VALUES

    @property
    def strings(self) -> int:
        """Most strings."""
        return self.inputs * PER_INPUT

    @property
    def containers(self) -> int:
        """Most lists and objects."""
        return self.inputs * PER_INPUT

    def refuse(self, body: Buffer | bytes) -> None:
        """Raise ``InvalidRequestError`` if there are more."""
        if len(body) < COUNTED_FROM or self._counts_fit(body):
            return
        strings = containers = commas = 0
        inside, escape = False, b""
        for begin in range(0, len(body), COUNTED_AT_ONCE):
            piece = escape + bytes(body[begin : begin + COUNTED_AT_ONCE])
            # Behind a backslash nothing ends a string; one at the end belongs to the next piece.
            plain = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
            escape = b"\\" if plain.endswith(b"\\") else b""
            characters = np.frombuffer(plain, dtype=np.uint8)
            within = np.logical_xor.accumulate(characters == QUOTE) ^ inside
            counts = np.bincount(characters[~within], minlength=256)  # a closing quote is outside, an opening one not
            inside = bool(within[-1])
            strings += int(counts[QUOTE])
            containers += int(counts[BRACKET] + counts[BRACE])
            commas += int(counts[COMMA])
            if strings > self.strings:
                raise self._too_many(f"{self.strings} strings")
            if containers > self.containers:
                raise self._too_many(f"{self.containers} lists and objects")
            if commas > self.values:
                raise self._too_many(f"{self.values} values")

    def _counts_fit(self, body: Buffer | bytes) -> bool:
        """Whether there are few enough even if characters within strings are counted too."""
        characters = np.frombuffer(body, dtype=np.uint8)
        quotes = containers = commas = 0
        for begin in range(0, len(characters), COUNTED_AT_ONCE):
            piece = characters[begin : begin + COUNTED_AT_ONCE]
            quotes += int(np.count_nonzero(piece == QUOTE))
            containers += int(np.count_nonzero(piece == BRACKET) + np.count_nonzero(piece == BRACE))
            commas += int(np.count_nonzero(piece == COMMA))
        return quotes // 2 <= self.strings and containers <= self.containers and commas <= self.values

    def _too_many(self, limit: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"The body has more than {limit}, too many to be read at once for at most {self.inputs} inputs; ask in "
            "smaller parts."
        )


def json_limits_of(network: NetworkConfig) -> JsonLimits:
    """Return the limits that a server's settings give."""
    return JsonLimits(network.max_inputs_per_request)
