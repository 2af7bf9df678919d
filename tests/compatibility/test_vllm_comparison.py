"""The comparison of two answers finds what differs, and nothing else."""

from base64 import b64encode
from typing import Any

import numpy as np
import pytest

from tests.compatibility.http_answer import shortened
from tests.compatibility.vllm_cases.case import Case, post
from tests.compatibility.vllm_comparison import differences

NUMBERS = [0.25, -0.5, 1.5, -3.0]
THEIRS = {"id": "embd-…", "data": [{"index": 0, "embedding": NUMBERS}], "usage": {"prompt_tokens": 3, "details": None}}


def good(body: Any) -> dict[str, Any]:
    return {"status": 200, "json": body}


def refused(message: str, kind: str = "BadRequestError") -> dict[str, Any]:
    return {"status": 400, "json": {"error": {"message": message, "type": kind, "code": 400}}}


def case(**more: Any) -> Case:
    fields = more.pop("fields", {})
    return post("a case", "/v1/embeddings", "embedding", {"input": "a", **fields}, **more)


@pytest.mark.parametrize(
    ("ours", "found"),
    [
        ({**THEIRS, "more": 1}, ""),
        ({**THEIRS, "id": "embd-7"}, ""),
        ({**THEIRS, "usage": {"prompt_tokens": 3}}, ""),
        ({**THEIRS, "data": [{"index": 0, "embedding": [0.250001, -0.5, 1.5, -3]}]}, ""),
        ({**THEIRS, "data": [{"index": 0, "embedding": [0.251, -0.5, 1.5, -3]}]}, "data.0.embedding.0"),
        ({**THEIRS, "data": [{"index": 0, "embedding": NUMBERS[:3]}]}, "data.0.embedding"),
        ({**THEIRS, "data": [{"index": 0, "embedding": ["0.25", -0.5, 1.5, -3]}]}, "data.0.embedding.0"),
        ({**THEIRS, "data": []}, "data"),
        ({**THEIRS, "usage": {}}, "usage.prompt_tokens is missing"),
        ({**THEIRS, "id": 7}, "id is 7"),
        ({**THEIRS, "usage": {"prompt_tokens": True}}, "usage.prompt_tokens is True"),
        (None, " is None"),
    ],
)
def test_every_field_must_be_there_and_the_same(ours, found):
    (fault,) = differences(case(), good(THEIRS), good(ours)) or [""]
    assert fault.startswith(found) if found else not fault


def test_fields_that_may_differ_are_left_out_unless_the_comparison_is_strict():
    allowing = case(reason="why", differs=("data.0.embedding", "usage"))
    ours = {**THEIRS, "data": [{"index": 0, "embedding": [1.0]}], "usage": {}}
    assert differences(allowing, good(THEIRS), good(ours)) == []
    assert len(differences(allowing, good(THEIRS), good(ours), is_strict=True)) == 2


def test_errors_have_the_same_status_the_parts_of_the_message_and_the_kind():
    saying = case(says=("too long",))
    assert differences(saying, refused("It is too long."), refused("This is too long, too.")) == []
    assert differences(saying, refused("too long", "Bad Request"), refused("too long")) == []
    assert differences(saying, refused("It is too long."), refused("No."))
    assert differences(saying, refused("No."), refused("It is too long.")), "the case must be true of vLLM"
    assert differences(saying, refused("too long"), refused("too long", "NotFoundError"))
    assert differences(saying, refused("too long"), good({}))
    assert differences(case(), refused("too long"), {"status": 400, "json": {}})


def test_another_status_must_be_the_one_that_is_declared():
    declared = case(reason="why", status=200)
    assert differences(declared, refused("No."), good({})) == []
    assert differences(declared, refused("No."), refused("No."))
    assert differences(declared, refused("No."), good({}), is_strict=True)


@pytest.mark.parametrize(("dtype", "slight", "gross"), [("<f4", 1e-6, 1e-2), ("<f2", 1e-4, 0.1), (">f2", 1e-4, 0.1)])
def test_encoded_numbers_are_compared_as_numbers(dtype, slight, gross):
    names = {"<f4": ("float32", "little"), "<f2": ("float16", "little"), ">f2": ("float16", "big")}
    fields = dict(zip(("embed_dtype", "endianness"), names[dtype], strict=True))

    def answer(step: float) -> dict[str, Any]:
        numbers = np.linspace(-1, 1, 64)
        numbers[5] += step
        return good({"data": [{"embedding": b64encode(numbers.astype(dtype).tobytes()).decode()}]})

    assert differences(case(fields=fields), answer(0), answer(slight)) == []
    assert differences(case(fields=fields), answer(0), answer(gross))
    assert differences(case(fields=fields), answer(0), good({"data": [{"embedding": "AAAA"}]}))
    assert differences(case(fields=fields), answer(0), good({"data": [{"embedding": "not base64"}]}))


def test_bytes_are_compared_with_their_metadata():
    theirs = {"status": 200, "bytes": b64encode(np.float32(NUMBERS).tobytes()).decode(), "metadata": {"shape": [4]}}
    assert differences(case(), theirs, dict(theirs)) == []
    assert differences(case(), theirs, {**theirs, "metadata": {"shape": [2, 2]}})
    assert differences(case(), theirs, {**theirs, "bytes": b64encode(np.float32(NUMBERS[::-1]).tobytes()).decode()})
    assert differences(case(), theirs, good({}))


def test_what_is_recorded_has_neither_times_nor_random_ids_nor_long_lists():
    answer = {"id": "embd-0123456789abcdef", "created": 1, "embedding": [0.5] * 64, "texts": ["a"] * 8}
    assert shortened(answer) == {
        "id": "embd-…", "embedding": {"first": [0.5] * 4, "length": 64}, "texts": ["a"] * 8,
    }  # fmt: skip
    assert shortened({"id": "embd-abc"}) == {"id": "embd-abc"}
