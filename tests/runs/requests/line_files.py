"""Files of requests."""

import json
from pathlib import Path

ENDPOINT = "/v1/embeddings"


def line(number: int, *, url: str = ENDPOINT, method: str = "POST", **fields: object) -> dict:
    body = {"model": "model", "input": f"w{number % 9} hello world"} | fields
    return {"custom_id": f"row-{number}", "method": method, "url": url, "body": body}


def encoded(lines: list[dict]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def written(path: Path, lines: list[dict]) -> Path:
    path.write_bytes(encoded(lines))
    return path


def decoded(content: bytes) -> list[dict]:
    assert content.endswith(b"\n") or not content
    return [json.loads(each) for each in content.splitlines()]
