"""Values of fields: bounds of numbers, limits on lists, values that are refused, and fields that mean the same.

Numbers are bounded when they are decoded, by the capacity of arrays and of messages between processes. Within these
bounds the tasks judge, which know the model; ``/openapi.json`` shows both the bounds and the descriptions. No value is
ignored silently.
"""

from collections.abc import Sequence, Sized
from typing import Annotated, Any, TypeAlias

import attrs
import msgspec

from trio_pool_serve.errors import EmptyInputError, InvalidRequestError, listed, require_request
from trio_pool_serve.tasks.input_params import InputParams

INT32 = {"ge": -(2**31), "le": 2**31 - 1}
INT64 = {"ge": -(2**63), "le": 2**63 - 1}

Priority: TypeAlias = Annotated[
    int, msgspec.Meta(**INT64, description="Rows of a smaller priority are computed first.")
]

Dimensions: TypeAlias = Annotated[
    int, msgspec.Meta(**INT32, description="From 1 to the length of the model's vectors.")
]

TokenCount: TypeAlias = Annotated[int, msgspec.Meta(**INT32, description="At least 1.")]

TokenLimit: TypeAlias = Annotated[int, msgspec.Meta(**INT32, description="At least 1; 0 is no limit.")]

TruncationLength: TypeAlias = Annotated[
    int, msgspec.Meta(**INT32, description="From 1 to the model's maximum, in tokens; -1 is that maximum.")
]

TokenPoolingFactor: TypeAlias = Annotated[
    float,
    msgspec.Meta(
        ge=1, le=2**31 - 1, description="Tokens of a document per vector, on average: 2 halves the number of vectors."
    ),
]

MaxActiveDims: TypeAlias = Annotated[
    int, msgspec.Meta(ge=1, le=2**31 - 1, description="The greatest weights of a sparse vector that are returned.")
]

TopK: TypeAlias = Annotated[int, msgspec.Meta(**INT32, description="At least 1; more than there are is all of them.")]

TopN: TypeAlias = Annotated[
    int, msgspec.Meta(**INT32, description="At least 1; more than there are, and 0, is all of them.")
]

TokenId: TypeAlias = Annotated[int, msgspec.Meta(**INT32, description="Within the model's vocabulary.")]


@attrs.frozen(kw_only=True, slots=False)  # some requests have a second base class
class WireRequest:
    """The body of a request; ``model`` is a name of a model, by default of the first that the client may use."""

    model: str | None = None


def require_few(count: int, max_inputs: int, *, param: str, what: str = "inputs") -> None:
    """Raise ``InvalidRequestError`` for more than ``--max-inputs-per-request`` inputs, or parts that cost as much."""
    require_request(
        count <= max_inputs, f"has {count} {what}; the limit is {max_inputs} (--max-inputs-per-request).", at=param
    )


def require_given(value: object, problem: str = "is empty.", *, at: str) -> None:
    """Raise ``EmptyInputError`` for a text or list without anything in it; ``at`` is its place in the request."""
    if not value:
        raise EmptyInputError.at(at, problem)


def require_some(inputs: Sized, max_inputs: int, *, param: str) -> None:
    """Raise as ``require_few``, and ``EmptyInputError`` for no inputs."""
    require_given(inputs, at=param)
    require_few(len(inputs), max_inputs, param=param)


def require_least(number: int | None, *, least: int = 0, param: str = "top_n") -> None:
    """Raise ``InvalidRequestError`` for a number below ``least``: by default, of documents to return."""
    require_request(number is None or number >= least, f"must be at least {least}, not {number}.", at=param)


def refused(because: str, accepted: Sequence[Any] = ()) -> Any:
    """Return an attrs field that refuses values other than null and ``accepted`` ones, which change nothing."""

    def refuse(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if value is not None and value not in accepted:
            choices = listed([*map(quoted, (*accepted, None))])
            wanted = (
                f"{attribute.name} must be {choices}, not {_sent(value)}"
                if accepted
                else f"Leave out `{attribute.name}`"
            )
            raise InvalidRequestError(f"{wanted}: {because}.", param=attribute.name)

    return attrs.field(default=None, validator=refuse, metadata={"because": because, "accepted": accepted})


def refuse_given(wire: object, names: Sequence[str], because: str) -> None:
    """Raise ``InvalidRequestError`` if any of these fields has a value other than null and false."""
    for name in names:
        value = getattr(wire, name)
        require_request(value is None or value is False, f"Leave out `{name}`: it {because}.", param=name)


def the_same(wire: object, *names: str) -> Any:
    """Return the value of fields that mean the same, or ``None``. Raises ``InvalidRequestError`` if they differ."""
    given = {name: value for name in names if (value := getattr(wire, name)) is not None}
    first = next(iter(given.values()), None)
    if any(value != first for value in given.values()):
        values = " and ".join(f"{name} is {quoted(value)}" for name, value in given.items())
        raise InvalidRequestError(f"These fields mean the same, but differ: {values}.", param=list(given)[-1])
    return first


def with_truncation(params: InputParams, wire: object, *, truncates: bool | None) -> InputParams:
    """Return input params that refuse texts that are too long, or truncate them. Raises ``InvalidRequestError``."""
    if truncates is False:
        refuse_given(wire, ("truncate_prompt_tokens",), "truncates, but truncation is turned off")
        return attrs.evolve(params, refuses_longer=True)
    return attrs.evolve(params, truncate_to=-1) if truncates and params.truncate_to is None else params


def wants_logits(wire: object) -> bool:
    """Return whether logits are asked for, by vLLM's or infinity's names. Raises ``InvalidRequestError``."""
    activation, raw = the_same(wire, "use_activation", "activation"), getattr(wire, "raw_scores", None)
    require_request(
        raw is None or raw is not activation, "raw_scores and use_activation contradict each other.", param="raw_scores"
    )
    return activation is False or raw is True


def _sent(value: object) -> str:
    """Return a description of a value for an error: a list or an object is not quoted."""
    if isinstance(value, str | int | float):
        return quoted(value)
    return "a list" if isinstance(value, list) else "an object"


def quoted(value: object) -> str:
    """Return the beginning of a value as errors quote it: a text in single quotes, anything else as JSON."""
    return repr(value)[:100] if isinstance(value, str) else msgspec.json.encode(value).decode()[:100]
