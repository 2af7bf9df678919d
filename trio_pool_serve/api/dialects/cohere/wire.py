"""What Cohere's requests and answers have in common."""

from typing import Literal, TypeAlias

from attrs import frozen

from trio_pool_serve.tasks.input_params import InputParams

Truncate: TypeAlias = Literal["NONE", "START", "END"]
"""Which end of a text that is too long is cut off."""


@frozen(kw_only=True)
class ApiVersion:
    """Of the API, not of the server."""

    version: str


@frozen(kw_only=True)
class Meta:
    """What each answer says about itself."""

    api_version: ApiVersion
    billed_units: dict[str, int]


def meta_of(version: str, **billed_units: int) -> Meta:
    """Return what an answer of a version of the API says."""
    return Meta(api_version=ApiVersion(version=version), billed_units=billed_units)


def reading_of(truncate: Truncate | None) -> InputParams:
    """Return how texts are read; by default their ends are cut off, as Cohere does it."""
    return InputParams(
        truncate_to=None if truncate == "NONE" else -1, truncation_side="left" if truncate == "START" else "right"
    )
