"""How an answer of this server is held against the one that vLLM gave."""

from base64 import b64decode
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from tests.compatibility.vllm_cases.case import Case
from trio_pool_serve.types import Vectors

TOLERANCE = 1e-4
"""Of numbers in float32, relative and absolute."""
DTYPES: Mapping[str, tuple[torch.dtype, float]] = {
    "float32": (torch.float32, TOLERANCE),
    "float16": (torch.float16, 2**-9),
    "bfloat16": (torch.bfloat16, 2**-7),
    "fp8_e4m3": (torch.float8_e4m3fn, 2**-3),
    "fp8_e5m2": (torch.float8_e5m2, 2**-2),
}
"""The types of encoded numbers, and how far apart two neighbours can be."""
MOSTLY_EQUAL = 0.9
"""So many of the numbers of a small type are the same: float32 differs in its last digits only."""
ENCODED = ("embedding", "data", "base64")
ERRORS = 400
CUT_ID = "…"
LONGEST_MESSAGE = 90


def differences(
    case: Case, theirs: Mapping[str, Any], ours: Mapping[str, Any], *, is_strict: bool = False
) -> list[str]:
    """Return what differs that should not; with ``is_strict``, also what the case allows."""
    status = theirs["status"] if is_strict or case.status is None else case.status
    if ours["status"] != status:
        return [f"status {ours['status']}, expected {status}: {message_of(ours) or '(no message)'}"]
    if status != theirs["status"]:
        return []
    if status >= ERRORS:
        return list(_of_errors(case, theirs, ours))
    allowed = () if is_strict else case.differs
    return [*_of_bytes(case, theirs, ours), *_of_json(case, "", theirs.get("json", {}), ours.get("json", {}), allowed)]


def message_of(answer: Mapping[str, Any]) -> str:
    """Return the message of an error, if there is one."""
    body = answer.get("json")
    error = body.get("error", body.get("detail", body.get("message"))) if isinstance(body, dict) else None
    return str(error["message"] if isinstance(error, dict) else error or "")


def _of_errors(case: Case, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    for fragment in case.says:
        if fragment not in message_of(theirs):
            yield f"vLLM does not say {fragment!r}: {message_of(theirs)}"
        if fragment not in message_of(ours):
            yield f"does not say {fragment!r}: {message_of(ours)}"
    if not message_of(ours):
        yield f"the error has no message: {ours}"
    expected, found = (answer.get("json", {}).get("error") for answer in (theirs, ours))
    if isinstance(expected, dict) and isinstance(found, dict):
        if found["code"] != expected["code"]:
            yield f"code {found['code']}, expected {expected['code']}"
        if not found["type"].startswith(expected["type"].replace(" ", "")):
            yield f"type {found['type']}, expected {expected['type']}"


def _of_bytes(case: Case, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    if "bytes" in theirs:
        if "bytes" not in ours:
            yield f"no bytes: {ours}"
        elif not _are_near(case, theirs["bytes"], ours["bytes"]):
            yield "other numbers"
        yield from _of_json(case, "metadata", theirs.get("metadata"), ours.get("metadata"), case.differs)


def _of_json(case: Case, path: str, theirs: Any, ours: Any, allowed: tuple[str, ...]) -> Iterator[str]:
    """Everything in vLLM's answer that is not null must be in ours; there may be more."""
    if path in allowed:
        return
    match theirs:
        case dict() if isinstance(ours, dict):
            for name, item in theirs.items():
                below = f"{path}.{name}".removeprefix(".")
                if name in ours:
                    yield from _of_json(case, below, item, ours[name], allowed)
                elif item is not None and below not in allowed:
                    yield f"{below} is missing"
        case list() if isinstance(ours, list) and len(ours) == len(theirs):
            for index, (item, own) in enumerate(zip(theirs, ours, strict=True)):
                yield from _of_json(case, f"{path}.{index}".removeprefix("."), item, own, allowed)
        case str() if isinstance(ours, str):
            if not _is_same_text(case, path, theirs, ours):
                yield f"{path} is {ours!r}, expected {theirs!r}"
        case int() | float() if isinstance(ours, int | float) and not {type(theirs), type(ours)} & {bool}:
            if not abs(ours - theirs) <= TOLERANCE * (1 + abs(theirs)):
                yield f"{path} is {ours}, expected {theirs}"
        case _:
            if type(theirs) is not type(ours) or theirs != ours:
                yield f"{path} is {ours!r}, expected {theirs!r}"


def _is_same_text(case: Case, path: str, theirs: str, ours: str) -> bool:
    if theirs == ours or theirs.endswith(CUT_ID):
        return True
    names = [name for name in path.split(".") if not name.isdecimal()]
    return names[-1] in ENCODED and isinstance(case.body, dict) and _are_near(case, theirs, ours)


def _are_near(case: Case, theirs: str, ours: str) -> bool:
    """Whether two strings of base64 are of about the same numbers."""
    dtype, step = DTYPES[case.body.get("embed_dtype", "float32")]
    try:
        expected, found = (_numbers(case, text, dtype) for text in (theirs, ours))
    except ValueError:  # not base64, or bytes that are no numbers
        return False
    if expected.shape != found.shape:
        return False
    is_equal = (expected == found).mean() >= MOSTLY_EQUAL or dtype is torch.float32
    return bool(
        is_equal and np.allclose(expected, found, rtol=step, atol=step / 16 if dtype.itemsize == 1 else TOLERANCE)
    )


def _numbers(case: Case, text: str, dtype: torch.dtype) -> Vectors:
    raw = np.frombuffer(b64decode(text), dtype=np.uint8).reshape(-1, dtype.itemsize)
    if case.body.get("endianness") == "big":
        raw = raw[:, ::-1]
    return torch.from_numpy(raw.flatten()).view(dtype).float().numpy()


def summary(answer: Mapping[str, Any]) -> str:
    """Return the status, and the beginning of the message of an error."""
    message = " ".join(message_of(answer).split()) if answer["status"] >= ERRORS else ""
    if len(message) > LONGEST_MESSAGE:
        message = message[:LONGEST_MESSAGE].rpartition(" ")[0] + " …"
    return f"{answer['status']}: {message}" if message else str(answer["status"])
