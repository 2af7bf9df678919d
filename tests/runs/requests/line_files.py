"""Files of requests, and runs over them that are cut off."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

ENDPOINT = "/v1/embeddings"


def line(number: int, *, url: str = ENDPOINT, method: str = "POST", **fields: object) -> dict:
    body = {"model": "model", "input": f"w{number % 9} hello world"} | fields
    return {"custom_id": f"row-{number}", "method": method, "url": url, "body": body}


def encoded(lines: list[dict]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def rows(number: int) -> bytes:
    return encoded([line(each) for each in range(number)])


def written(path: Path, lines: list[dict]) -> Path:
    path.write_bytes(encoded(lines))
    return path


def decoded(content: bytes) -> list[dict]:
    assert content.endswith(b"\n") or not content
    return [json.loads(each) for each in content.splitlines()]


class Abort(trio.abc.Instrument):
    """Cancels a scope before a step of a task."""

    def __init__(self, at: int, scope: trio.CancelScope) -> None:
        self.left, self.scope, self.task = at, scope, trio.lowlevel.current_task()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.left -= 1
            if not self.left:
                self.scope.cancel()


@contextmanager
def cancelled_before(step: int) -> Iterator[trio.CancelScope]:
    """Cancel the block before that step of its task."""
    with trio.CancelScope() as scope:
        abort = Abort(step, scope)
        trio.lowlevel.add_instrument(abort)
        try:
            yield scope
        finally:
            trio.lowlevel.remove_instrument(abort)
