"""The comparison of two answers finds what differs, and nothing else."""

from base64 import b64encode
from typing import Any

import numpy as np
import pytest

from tests.compatibility.vllm_cases.case import Case, embed
from tests.compatibility.vllm_comparison import differences

NUMBERS = [0.25, -0.5, 1.5, -3.0]
THEIRS = {"id": "embd-…", "data": [{"index": 0, "embedding": NUMBERS}], "usage": {"prompt_tokens": 3, "details": None}}
LENIENT = embed("a case", reason="why", differs=("data.0.embedding", "usage"))
DECLARED = embed("a case", reason="why", status=200)
SAYING = embed("a case", says=("too long",))
PLAIN = embed("a case")


def good(body: Any = THEIRS, **changes: Any) -> dict[str, Any]:
    return {"status": 200, "json": body if body is None else {**body, **changes}}


def data(*numbers: Any) -> dict[str, Any]:
    return good(data=[{"index": 0, "embedding": [*numbers]}])


def refused(message: str, kind: str = "BadRequestError") -> dict[str, Any]:
    return {"status": 400, "json": {"error": {"message": message, "type": kind, "code": 400}}}


def encoded(dtype: str, step: float = 0) -> dict[str, Any]:
    numbers = np.linspace(-1, 1, 64)
    numbers[5] += step
    return good({"data": [{"embedding": b64encode(numbers.astype(dtype).tobytes()).decode()}]})


def of_bytes(*numbers: float, shape: tuple[int, ...] = (4,)) -> dict[str, Any]:
    return {"status": 200, "bytes": b64encode(np.float32(numbers).tobytes()).decode(), "metadata": {"shape": [*shape]}}


ENCODED = [
    (embed("a case", embed_dtype=name, endianness=order), encoded(dtype), ours, fault)
    for dtype, name, order, slight, gross in (
        ("<f4", "float32", "little", 1e-6, 1e-2), ("<f2", "float16", "little", 1e-4, 0.1),
        (">f2", "float16", "big", 1e-4, 0.1),
    )
    for ours, fault in (
        (encoded(dtype, slight), ""), (encoded(dtype, gross), "data.0.embedding is"),
        *((good({"data": [{"embedding": text}]}), "data.0.embedding is") for text in ("AAAA", "not base64")),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "theirs", "ours", "fault"),
    [
        (PLAIN, good(), good(more=1), ""),
        (PLAIN, good(), good(id="embd-7", usage={"prompt_tokens": 3}), ""),
        (PLAIN, good(), data(0.250001, -0.5, 1.5, -3), ""),
        (PLAIN, good(), data(0.251, -0.5, 1.5, -3), "data.0.embedding.0"),
        (PLAIN, good(), data(*NUMBERS[:3]), "data.0.embedding"),
        (PLAIN, good(), data("0.25", -0.5, 1.5, -3), "data.0.embedding.0"),
        (PLAIN, good(), good(data=[]), "data"),
        (PLAIN, good(), good(usage={}), "usage.prompt_tokens is missing"),
        (PLAIN, good(), good(id=7), "id is 7"),
        (PLAIN, good(), good(usage={"prompt_tokens": True}), "usage.prompt_tokens is True"),
        (PLAIN, good(), good(None), " is None"),
        (LENIENT, good(), good(data=[{"index": 0, "embedding": [1.0]}], usage={}), ""),
        (SAYING, refused("It is too long."), refused("This is too long, too."), ""),
        (SAYING, refused("too long", "Bad Request"), refused("too long"), ""),
        (SAYING, refused("It is too long."), refused("No."), "does not say"),
        (SAYING, refused("No."), refused("It is too long."), "vLLM does not say"),
        (SAYING, refused("too long"), refused("too long", "NotFoundError"), "type NotFoundError"),
        (SAYING, refused("too long"), good(), "status 200, expected 400"),
        (PLAIN, refused("too long"), {"status": 400, "json": {}}, "the error has no message"),
        (DECLARED, refused("No."), good(), ""),
        (DECLARED, refused("No."), refused("No."), "status 400, expected 200"),
        *ENCODED,
        (PLAIN, of_bytes(*NUMBERS), of_bytes(*NUMBERS), ""),
        (PLAIN, of_bytes(*NUMBERS), of_bytes(*NUMBERS, shape=(2, 2)), "metadata.shape"),
        (PLAIN, of_bytes(*NUMBERS), of_bytes(*NUMBERS[::-1]), "other numbers"),
        (PLAIN, of_bytes(*NUMBERS), good(), "no bytes"),
    ],
)
def test_what_differs_is_found_and_nothing_else(case: Case, theirs: Any, ours: Any, fault: str):
    found = next(iter(differences(case, theirs, ours)), "")
    assert found.startswith(fault) if fault else not found
