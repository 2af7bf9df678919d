"""Requests of many kinds and sizes, the same ones in every run: what a server may meet in its life.

Texts of 3 to 500 tokens, batches of 1 to 64, every encoding, calls of ``/tokenize``, bodies of half a megabyte,
requests that are refused, and clients that leave before their answer.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

import httpx
import msgspec
import trio
from attrs import frozen

from benchmarks.load import UnexpectedAnswerError
from benchmarks.model import MODEL_NAME

ENCODINGS = ("float", "base64")

SINGLE_SHARE, TOKENIZE_SHARE, LARGE_SHARE, INVALID_SHARE, LEFT_SHARE = 0.65, 0.1, 0.01, 0.05, 0.05
"""Shares of requests: with a single text, of ``/tokenize``, with a large body, refused, and left by their client."""

LARGE_CHARACTERS = 500_000

INVALID: Sequence[tuple[bytes, HTTPStatus]] = (
    (b"{", HTTPStatus.BAD_REQUEST),
    (b'{"input": []}', HTTPStatus.BAD_REQUEST),
    (b'{"input": "a", "model": "none"}', HTTPStatus.NOT_FOUND),
    (b'{"input": "a", "dimensions": -1}', HTTPStatus.BAD_REQUEST),
)


@frozen
class MixedRequest:
    """One request, and the status that it is answered with. A client that leaves waits ``leaves_after_s`` at most."""

    path: str
    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    leaves_after_s: float = math.inf

    async def send(self, client: httpx.AsyncClient) -> None:
        """Send it and read its answer, or leave. Raises ``UnexpectedAnswerError``.

        Cancellation: at once; the connection is closed.
        """
        with trio.move_on_after(self.leaves_after_s):
            answer = await client.post(self.path, content=self.body, headers={"Content-Type": "application/json"})
            if answer.status_code != self.status:
                raise UnexpectedAnswerError(f"{answer.status_code}, not {self.status}: {answer.text[:200]}")


async def send_all(
    url: str, requests: Iterator[MixedRequest], clients: int, on_failure: Callable[[Exception], object] | None = None
) -> None:
    """Send requests by closed-loop clients, which take them in turns.

    Raises the first failure in a group, or calls ``on_failure``. Cancellation: at once.
    """

    async def send() -> None:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=300) as client:
            for request in requests:
                try:
                    await request.send(client)
                except Exception as error:
                    if on_failure is None:
                        raise
                    on_failure(error)

    async with trio.open_nursery() as nursery:
        for _ in range(clients):
            nursery.start_soon(send)


def mixed_request(words: Sequence[str], number: int, max_tokens: int) -> MixedRequest:
    """Return the request of that number, with texts of ``words`` that are a token each.

    A batch has at most about ``max_tokens``, so batches of long texts are smaller than those of short ones.
    """
    choose = random.Random(number)
    kind = choose.random()
    if kind < INVALID_SHARE:
        body, status = choose.choice(INVALID)
        return MixedRequest("/v1/embeddings", body, status)
    kind -= INVALID_SHARE
    if kind < TOKENIZE_SHARE:
        return MixedRequest("/tokenize", _json(prompt=_text(choose, words, _log_uniform(choose, 1, 498))))
    kind -= TOKENIZE_SHARE
    if kind < LARGE_SHARE:
        text = _text(choose, words, LARGE_CHARACTERS // 6)
        return MixedRequest("/v1/embeddings", _json(input=text, truncate_prompt_tokens=500))
    kind -= LARGE_SHARE
    return MixedRequest(
        "/v1/embeddings",
        _json(input=_texts(choose, words, max_tokens), encoding_format=choose.choice(ENCODINGS)),
        leaves_after_s=choose.uniform(0, 0.05) if kind < LEFT_SHARE else math.inf,
    )


def _texts(choose: random.Random, words: Sequence[str], max_tokens: int) -> list[str]:
    tokens = _log_uniform(choose, 3, 500)
    rows = 1 if choose.random() < SINGLE_SHARE else _log_uniform(choose, 2, 64)
    rows = min(rows, max(1, max_tokens // tokens))
    # Of about one length, as chunks of a document are, or of any.
    shortest = choose.choice((tokens, max(3, tokens // 2), 3))
    return [_text(choose, words, choose.randint(shortest, tokens) - 2) for _ in range(rows)]


def _text(choose: random.Random, words: Sequence[str], count: int) -> str:
    return " ".join(choose.choices(words, k=count))


def _log_uniform(choose: random.Random, least: int, most: int) -> int:
    return round(math.exp(choose.uniform(math.log(least), math.log(most))))


def _json(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": MODEL_NAME, **fields})
