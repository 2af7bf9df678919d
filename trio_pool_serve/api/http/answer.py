"""What goes back over the wire."""

from collections.abc import Mapping
from typing import Self

import msgspec
from attrs import Factory, evolve, frozen

from trio_pool_serve.api.http.event_stream import EventStream


@frozen(eq=False)
class Answer:
    """A request's answer: all of its bytes, or events that go out as they are made."""

    body: bytes | EventStream
    content_type: str = "application/json"
    headers: Mapping[str, str] = Factory(dict)
    status: int = 200

    @classmethod
    def json(cls, value: object, status: int = 200) -> Self:
        """Return the answer that says ``value``, which msgspec can encode."""
        return cls(msgspec.json.encode(value), status=status)

    def also_saying(self, headers: Mapping[str, str]) -> Self:
        """Return the same answer with more headers."""
        return evolve(self, headers={**self.headers, **headers})
