"""Numbers as clients send them: bounded where they are decoded, by what arrays and messages between processes can hold.

Within these bounds the tasks judge, which know the model; ``/openapi.json`` has both the bounds and the descriptions.
"""

from collections.abc import Sized
from typing import Annotated, TypeAlias

import msgspec

from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import EmptyInputError, InvalidRequestError

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

TopK: TypeAlias = Annotated[int, msgspec.Meta(**INT32, description="At least 1; more than there are is all of them.")]

TopN: TypeAlias = Annotated[
    int, msgspec.Meta(**INT32, description="At least 1; more than there are, and 0, is all of them.")
]

TokenId: TypeAlias = Annotated[int, msgspec.Meta(**INT32, description="Within the model's vocabulary.")]


def require_few(inputs: Sized, network: NetworkConfig, *, param: str) -> None:
    """Raise ``InvalidRequestError`` for more inputs than ``--max-inputs-per-request``."""
    require_few_parts(len(inputs), "inputs", network, param)


def require_some(inputs: Sized, network: NetworkConfig, *, param: str) -> None:
    """Raise as ``require_few``, and ``EmptyInputError`` for no inputs."""
    if not len(inputs):
        raise EmptyInputError(f"{param} is empty.", param=param)
    require_few(inputs, network, param=param)


def require_few_parts(count: int, what: str, network: NetworkConfig, param: str) -> None:
    """Raise ``InvalidRequestError`` for more than a request may have inputs: each costs as much as one."""
    if count > network.max_inputs_per_request:
        raise InvalidRequestError(
            f"{count} {what} are more than the {network.max_inputs_per_request} that a request may have "
            "(--max-inputs-per-request).",
            param=param,
        )
