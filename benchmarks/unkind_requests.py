"""Requests of clients that are unkind, by accident or by intent; the same ones for the same seed."""

import base64
import io
import json
import math
import random
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
from attrs import frozen

from benchmarks.chaotic_runner import OUT_OF_MEMORY, RAISES, WEDGES
from trio_pool_serve.load.client_connection import request_bytes

MODEL = "chaos"

WIDTH = 64
"""Width of the token embeddings of the tiny model."""

WORDS = ("nursery", "task", "cancel", "scope", "deadline", "channel", "event", "lock", "thread", "queue")

FIRST, LAST, A_WORD = 101, 102, 2000
"""Token ids of BERT: those around a text, and one of a word."""

KIND = ("text", "batch", "tokenize")
"""Kinds of requests that there is no reason to refuse."""

BAD_INPUT = "bad input"

SLOW_HEAD, GARBAGE, HTTP_2 = "slow head", "garbage", "HTTP/2 preface"

HOSTILE = (SLOW_HEAD, GARBAGE, HTTP_2)
"""Kinds whose connection the server may close without a response."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

HOSTILE_S = 2.0
"""A hostile client leaves after this time, if the server has not closed its connection."""


@frozen(kw_only=True)
class Plan:
    """What one client sends, part by part, and when it leaves; a request that is not whole is never answered."""

    kind: str
    parts: tuple[bytes, ...]
    pause_s: float = 0.0
    """After each part."""
    half_closes: bool = False
    leaves_after_s: float = math.inf
    parts_are_whole: bool = True

    @classmethod
    def post(cls, path: str, body: bytes, kind: str = "text", **more: Any) -> Self:
        """Return a plan to post a body, which is kind so far."""
        return cls(kind=kind, parts=(request_bytes(path, body),), **more)


def plan(seed: int, number: int) -> Plan:
    """Return the plan of the ``number``-th request."""
    choose = random.Random(f"{seed} {number}")
    (kind,) = choose.choices(list(KINDS), [weight for weight, _ in KINDS.values()])
    _, make = KINDS[kind]
    return make(choose, kind)


def _embed(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, **fields}).encode()


def _text(choose: random.Random, most: int = 100) -> str:
    return " ".join(choose.choices(WORDS, k=choose.randint(1, most)))


def _texts(choose: random.Random) -> bytes:
    return _embed(input=[_text(choose) for _ in range(choose.randint(2, 32))])


def _single(choose: random.Random, kind: str) -> Plan:
    return Plan.post("/v1/embeddings", _embed(input=_text(choose)), kind)


def _batch(choose: random.Random, kind: str) -> Plan:
    return Plan.post("/v1/embeddings", _texts(choose), kind)


def _tokenize(choose: random.Random, kind: str) -> Plan:
    return Plan.post("/tokenize", _embed(prompt=_text(choose, 1000)), kind)


def _leaves_early(choose: random.Random, kind: str) -> Plan:
    request = request_bytes("/v1/embeddings", _texts(choose))
    sent = request[: choose.randint(1, len(request) - 1)]
    return Plan(kind=kind, parts=(sent,), leaves_after_s=choose.uniform(0, 0.05), parts_are_whole=False)


def _leaves_waiting(choose: random.Random, kind: str) -> Plan:
    return Plan.post("/v1/embeddings", _texts(choose), kind, leaves_after_s=choose.uniform(0, 0.004))


def _leaves_computing(choose: random.Random, kind: str) -> Plan:
    return Plan.post("/v1/embeddings", _texts(choose), kind, leaves_after_s=choose.uniform(0.004, 0.06))


def _half_closes(choose: random.Random, kind: str) -> Plan:
    return Plan.post("/v1/embeddings", _texts(choose), kind, half_closes=True)


BAD_BODIES = (
    *(b"{", b"[]", b"null", b'"', b"\xff\xfe{}", b"{" * 5000, b"[" * 5000, b'{"input": 1e999}', b'{"input": "\xff"}'),
    *(_embed(input=[]), _embed(input=[[]]), _embed(input={}), _embed(input=None), _embed(), _embed(input=1.5)),
    *(_embed(input=[[ids]]) for ids in (-1, 30522, 2**31, 2**64, 1.5, "a")),
    *(_embed(input="a", dimensions=dimensions) for dimensions in (-1, 0, 10**9, "a")),
    *(_embed(input="a", encoding_format="x"), _embed(input="a", priority=2**70), b'{"input": "a", "model": "none"}'),
    _embed(input=" ".join(WORDS) * 200),
    *(_embed(prompt_embeds=junk) for junk in ("", "AAAA", "größer", base64.b64encode(b"PK\3\4" + bytes(99)).decode())),
)


def _bad_input(choose: random.Random, kind: str) -> Plan:
    return Plan.post("/v1/embeddings", choose.choice(BAD_BODIES), kind)


def _not_a_number(choose: random.Random, kind: str) -> Plan:
    """Send finite embeddings whose squares are not: what the model makes of them is no vector."""
    rows = np.full((choose.randint(1, 8), WIDTH), 3e38, dtype=np.float32)
    rows[:, ::2] *= -1
    stored = io.BytesIO()
    np.save(stored, rows)
    return Plan.post("/v1/embeddings", _embed(prompt_embeds=base64.b64encode(stored.getvalue()).decode()), kind)


def _marked(mark: int, *, alone: bool) -> Callable[[random.Random, str], Plan]:
    def make(choose: random.Random, kind: str) -> Plan:
        others = [[FIRST, *[A_WORD] * choose.randint(1, 30), LAST] for _ in range(0 if alone else 8)]
        rows = [[FIRST, mark, *[A_WORD] * choose.randint(1, 30), LAST], *others]
        choose.shuffle(rows)
        return Plan.post("/v1/embeddings", _embed(input=rows), kind)

    return make


def _slow_head(choose: random.Random, kind: str) -> Plan:
    head = request_bytes("/v1/embeddings", _texts(choose))[: choose.randint(10, 40)]
    parts = tuple(head[index : index + 1] for index in range(len(head)))
    return Plan(kind=kind, parts=parts, pause_s=HOSTILE_S / len(parts), leaves_after_s=0.0, parts_are_whole=False)


def _garbage(choose: random.Random, kind: str) -> Plan:
    garbage = choose.choice((choose.randbytes(choose.randint(1, 4096)), b"GET " * 9999, b"\r\n" * 999, b"\0" * 99))
    return Plan(kind=kind, parts=(garbage,), leaves_after_s=HOSTILE_S)


def _http_2(choose: random.Random, kind: str) -> Plan:
    frame = bytes(3) + b"\4" + bytes(5)
    parts = (PREFACE, frame, choose.randbytes(choose.randint(0, 64)))
    return Plan(kind=kind, parts=parts, leaves_after_s=HOSTILE_S)


KINDS: Mapping[str, tuple[float, Callable[[random.Random, str], Plan]]] = {
    "text": (28, _single),
    "batch": (12, _batch),
    "tokenize": (5, _tokenize),
    "leaves before the body": (8, _leaves_early),
    "leaves in the queue": (10, _leaves_waiting),
    "leaves on the device": (6, _leaves_computing),
    "half-closes": (5, _half_closes),
    BAD_INPUT: (10, _bad_input),
    "not a number": (2, _not_a_number),
    "raises": (2, _marked(RAISES, alone=True)),
    "raises among others": (2, _marked(RAISES, alone=False)),
    "out of memory": (2, _marked(OUT_OF_MEMORY, alone=True)),
    "out of memory among others": (2, _marked(OUT_OF_MEMORY, alone=False)),
    "wedges": (0.5, _marked(WEDGES, alone=True)),
    SLOW_HEAD: (0.5, _slow_head),
    GARBAGE: (2.5, _garbage),
    HTTP_2: (2.5, _http_2),
}
"""Kinds of requests, with their shares in percent."""
