"""Numbers as clients send them: bounded where they are decoded, by what arrays and messages between processes can hold.

Within these bounds the tasks judge, which know the model; ``/openapi.json`` has both the bounds and the descriptions.
"""

from typing import Annotated, TypeAlias

import msgspec

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
