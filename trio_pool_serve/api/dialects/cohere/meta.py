"""Fields that Cohere's requests and responses have in common."""

from typing import Literal, TypeAlias

from attrs import frozen

from trio_pool_serve.tasks.input_params import InputParams

Truncate: TypeAlias = Literal["NONE", "START", "END"]
"""The end of a text at which it is cut when it is too long."""


@frozen(kw_only=True)
class ApiVersion:
    """The version of the API, not of the server."""

    version: str


@frozen(kw_only=True)
class Meta:
    """The ``meta`` of each response."""

    api_version: ApiVersion
    billed_units: dict[str, int]


def meta_of(version: str, **billed_units: int) -> Meta:
    """Return the ``meta`` of a response of a version of the API."""
    return Meta(api_version=ApiVersion(version=version), billed_units=billed_units)


def input_params_of(truncate: Truncate | None) -> InputParams:
    """Return how texts are truncated: by default at their ends, as Cohere does it."""
    return InputParams(
        truncate_to=None if truncate == "NONE" else -1,
        refuses_longer=truncate == "NONE",
        truncation_side="left" if truncate == "START" else "right",
    )
