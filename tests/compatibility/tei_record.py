"""What TEI's OpenAPI document and its code say, item by item."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

RECORD: Mapping[str, Any] = json.loads((Path(__file__).parent / "tei_routes.json").read_text())
PAGE_DATA = Path(__file__).parents[2] / "docs" / "compared-with-tei.json"
"""What the tests have seen this server do; ``--write-compared`` writes it."""

ROUTES: Mapping[str, Any] = RECORD["routes"]
SERVER = "server"
"""The name of items that belong to no route."""


def items() -> Iterator[tuple[str, str]]:
    """Give every item that a case must show, as its route and its name.

    A request field has its own name. The rest are ``response``, ``headers`` and the statuses, such as ``424``.
    """
    for route, facts in ROUTES.items():
        yield from ((route, name) for name in facts["fields"])
        yield route, "response"
        if "headers" in facts:
            yield route, "headers"
        yield from ((route, status) for status in facts["statuses"])
    yield from ((SERVER, name) for name in RECORD["server"])


@frozen
class Seen:
    """What this server does: as TEI (``same``), that and more (``more``), or something else (``differs``)."""

    verdict: str
    note: str = ""

    def document(self) -> dict[str, str]:
        return {"verdict": self.verdict} | ({"note": self.note} if self.note else {})


SAME = Seen("same")


def more(note: str) -> Seen:
    return Seen("more", note)


def differs(note: str) -> Seen:
    return Seen("differs", note)


def shape_faults(shape: Any, value: Any, at: str = "") -> Iterator[str]:
    """Give what ``value`` lacks of a shape of the record, or has otherwise; further keys are no fault."""
    match shape:
        case dict():
            if not isinstance(value, dict):
                yield f"{at} is no object"
                return
            for name, inner in shape.items():
                if name not in value:
                    yield f"without `{at}{name}`"
                else:
                    yield from shape_faults(inner, value[name], f"{at}{name}.")
        case [inner]:
            if not isinstance(value, list) or not value:
                yield f"{at} is no list with items"
                return
            for item in value:
                yield from shape_faults(inner, item, at)
        case str():
            optional = shape.endswith("?") and value is None
            kinds = {"string": str, "integer": int, "number": int | float, "boolean": bool, "object": dict | list}
            if not optional and not isinstance(value, kinds[shape.removesuffix("?")]):
                yield f"`{at.removesuffix('.')}` is {json.dumps(value)}"


def further_keys(shape: Any, value: Any) -> set[str]:
    """Return the keys of ``value`` that a shape does not name."""
    match shape, value:
        case dict(), dict():
            inner = (further_keys(shape[name], value[name]) for name in shape if name in value)
            return {name for name in value if name not in shape}.union(*inner)
        case [inner], list():
            return set().union(*(further_keys(inner, item) for item in value))
    return set()
