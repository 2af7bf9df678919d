"""The messages of this wire version, as they are recorded: what differs from the record is another version.

After a change that is meant, raise ``WIRE_VERSION``, and record anew:
``python -m tests.engine.remote.test_wire_version``.
"""

from pathlib import Path
from typing import get_args

import attrs
import msgspec

from trio_pool_serve.engine.remote.frames import ArrayHeader
from trio_pool_serve.engine.remote.greeting import WIRE_VERSION, AnyGreeting
from trio_pool_serve.engine.remote.wire import (
    BatchFacts,
    Done,
    Failure,
    FromEngine,
    LonePrompt,
    Outputs,
    Part,
    Rows,
    ToEngine,
    Values,
)
from trio_pool_serve.types import ImageFeatures, PoolingParams

RECORD = Path(__file__).with_name("wire_version.txt")

MESSAGES = (*get_args(AnyGreeting), *get_args(ToEngine), *get_args(FromEngine))
PARTS = (BatchFacts, Part, Rows, LonePrompt, Outputs, Values, Failure, Done, ArrayHeader)


def described() -> str:
    """Return the version, and a line for each message, its parts and params: names and types of the fields."""
    lines = [f"version {WIRE_VERSION}"]
    for kind in (*MESSAGES, *PARTS):
        fields = ", ".join(f"{field.name}: {field.type}" for field in msgspec.structs.fields(kind))
        lines.append(f"{kind.__name__}({fields})")
    lines.append(f"images: {[(field.name, field.type) for field in attrs.fields(ImageFeatures)]}")
    for name, kind in sorted(PoolingParams.by_name.items()):
        if name.startswith("trio_pool_serve.types:"):
            fields = ", ".join(f"{field.name}: {field.type}" for field in attrs.fields(kind))
            lines.append(f"{name}({fields})")
    return "\n".join(lines) + "\n"


def test_the_messages_are_those_of_the_recorded_version():
    assert described() == RECORD.read_text()


if __name__ == "__main__":
    RECORD.write_text(described())
