"""A response as it is recorded: status, and what can be the same when it is asked for again."""

import json
import re
from base64 import b64encode
from typing import Any

import httpx

from tests.compatibility.vllm_cases.case import Case

FEW = 4
"""So many of a long list are recorded."""
LONG_LIST = 8
RANDOM = re.compile(r"[0-9a-f]{12,}(-[0-9a-f-]+)?$")
TIMES = ("created",)


def request_of(case: Case) -> dict[str, Any]:
    """Return the arguments of httpx's ``request``."""
    body = case.body
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    headers = {"content-type": "application/json", **case.headers}
    return {"method": case.method, "url": case.path, "content": body, "headers": headers, "follow_redirects": True}


def answer_of(response: httpx.Response) -> dict[str, Any]:
    """Return a response's record."""
    answer: dict[str, Any] = {"status": response.status_code}
    kind = response.headers.get("content-type", "").partition(";")[0]
    if kind == "application/octet-stream":
        answer["bytes"] = b64encode(response.content).decode()
        if "metadata" in response.headers:
            answer["metadata"] = shortened(json.loads(response.headers["metadata"]))
    elif kind == "application/json" and response.content:
        answer["json"] = shortened(response.json())
    elif kind and kind != "text/plain":
        answer["content-type"] = kind
    return answer


def shortened(value: Any) -> Any:
    """Return JSON without what is random, a time or long; numbers with the digits that float32 has."""
    match value:
        case dict():
            return {
                name: _id(item) if name == "id" else shortened(item)
                for name, item in value.items()
                if name not in TIMES
            }
        case list() if len(value) > LONG_LIST:
            return {"first": [shortened(item) for item in value[:FEW]], "length": len(value)}
        case list():
            return [shortened(item) for item in value]
        case float():
            return float(f"{value:.7g}")
        case _:
            return value


def _id(name: Any) -> Any:
    return RANDOM.sub("…", name) if isinstance(name, str) else name
