"""Request bodies of every dialect with extreme values in their fields, made from the wire types' own annotations."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hypothesis import strategies as st
from msgspec import inspect

from trio_pool_serve.api.dialects import DIALECTS
from trio_pool_serve.api.http.endpoint import DialectEndpoint
from trio_pool_serve.api.http.endpoint_choice import endpoints_by_path

ENDPOINTS: list[tuple[str, DialectEndpoint]] = [
    (path, candidate)
    for path, candidates in endpoints_by_path(DIALECTS).items()
    for candidate in candidates
    if path == candidate.endpoint.paths[0]
]

BITS = (7, 15, 31, 32, 53, 62, 63, 64, 100)
INTEGERS = sorted({sign * 2**bits + step for bits in BITS for sign in (-1, 1) for step in (-1, 0, 1)} | {0, -1, 1})

AS_WRITTEN = {
    "«huge»": "1e400",
    "«tiny»": "-1e-400",
    "«digits»": "9" * 5000,
    "«deep list»": "[" * 20_000 + "]" * 20_000,
    "«deep object»": '{"a":' * 20_000 + "1" + "}" * 20_000,
    "«nested nulls»": "[[null,[null]],{}]",
}
"""What no Python object gives when it is written as JSON."""

NUMBERS = [*INTEGERS, 1.5, -0.0, float("nan"), float("inf"), float("-inf"), "«huge»", "«tiny»", "«digits»"]

STRINGS = [
    "",
    "\0",
    "\ud800",
    "hello \udfff",
    "\ud800\ud800",
    "a" * 2**20,
    "w1 " * 2**18,
    "\U0001f600" * 2**10,
    "[CLS] [SEP] [PAD]",
    "query",
    "{{ '\ud800' }}",
    "data:image/png;base64," + "A" * 2**20,
    "file:///etc/passwd",
    "../" * 100,
]

JUNK = [
    *(0, -1, 2**31, -(2**31) - 1, 2**63, 2**64, -(2**100), 1.5, float("nan"), float("inf")),
    *("", "\ud800", "a" * 2**20, "«huge»", "«digits»", "«deep list»", "«deep object»", "«nested nulls»"),
    *(None, True, [], {}, [None], {"a": None}, [[2**100]]),
]
"""Values for any field."""


def json_of(body: object) -> bytes:
    """Return a body as JSON: lone surrogates as escapes, NaN and infinities as Python writes them."""
    text = json.dumps(body)
    for mark, written in AS_WRITTEN.items():
        text = text.replace(json.dumps(mark), written)
    return text.encode()


def fields_of(wire: type) -> Mapping[str, Any]:
    """Return the types of a wire type's fields, as msgspec decodes them."""
    return {field.encode_name: field.type for field in inspect.type_info(wire).fields}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Return values that have the JSON type of a field, however extreme."""
    match kind:
        case inspect.Metadata(type=inner):
            return values_of(inner)
        case inspect.IntType() | inspect.FloatType():
            return st.sampled_from(NUMBERS) | st.integers(-(2**100), 2**100)
        case inspect.StrType() | inspect.CustomType():
            return st.sampled_from(STRINGS)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.ListType(item_type=item):
            return st.lists(values_of(item), max_size=3)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(values_of, items))
        case inspect.DictType(value_type=value):
            return st.dictionaries(
                st.sampled_from(["a", "messages", "\ud800", "a" * 2**20]), values_of(value), max_size=2
            )
        case inspect.UnionType(types=types):
            return st.one_of([values_of(one) for one in types])
        case inspect.DataclassType(fields=fields):
            return st.fixed_dictionaries({}, optional={field.encode_name: values_of(field.type) for field in fields})
        case inspect.AnyType():
            return st.sampled_from(JUNK)
    raise TypeError(f"There are no extreme values of {kind}.")


@st.composite
def bodies(draw: st.DrawFn, candidate: DialectEndpoint, name: str, also: Mapping[str, Any]) -> bytes:
    """Return an endpoint's example, with ``also``, in which some fields are extreme.

    The one called ``name`` has a value of its type; one more, perhaps, has any value.
    """
    fields = fields_of(candidate.endpoint.wire)
    another = draw(st.none() | st.sampled_from(sorted(fields)))
    junk = {} if another is None else {another: draw(st.sampled_from(JUNK))}
    return json_of({**candidate.endpoint.example, **also, **junk, name: draw(values_of(fields[name]))})


def numbers_of(kind: Any) -> Iterator[inspect.IntType | inspect.FloatType]:
    """Give every number that a type may hold, however deep."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            yield kind
        case inspect.Metadata(type=inner) | inspect.ListType(item_type=inner) | inspect.DictType(value_type=inner):
            yield from numbers_of(inner)
        case inspect.UnionType(types=types):
            for one in types:
                yield from numbers_of(one)
        case inspect.TupleType(item_types=items):
            for item in items:
                yield from numbers_of(item)
        case inspect.DataclassType(fields=fields):
            for field in fields:
                yield from numbers_of(field.type)
