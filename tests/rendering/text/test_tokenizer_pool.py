"""Tokenizers under many threads: each lent to one at a time, all given back, and every prompt is as if alone.

A fast tokenizer of the ``tokenizers`` library has one truncation and one padding for all its threads: who sets them
while another thread encodes is told "Already borrowed". Here they are never set.
"""

import random
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import trio
from attrs import define, field
from tokenizers import Tokenizer as Backend
from transformers import ByT5Tokenizer

from tests.lanes import sampled
from tests.rendering.text.test_tokenizer import FAST_KINDS, fast_tokenizer
from trio_pool_serve.errors import ContextLengthError, InvalidRequestError
from trio_pool_serve.prompts import PairPrompt, Prompt, RenderingParams, TextPrompt
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.rendering.text.fast_tokenizer import FastTokenizer
from trio_pool_serve.rendering.text.slow_tokenizer import SlowTokenizer
from trio_pool_serve.rendering.text.text_renderer import TextRenderer
from trio_pool_serve.rendering.text.tokenizer import Encoded, Tokenizer, TokenizerPool
from trio_pool_serve.threads.offload import Offload

TASKS = 16
WORKERS = 4

Asked: TypeAlias = tuple[Prompt, RenderingParams]
Answer: TypeAlias = tuple[list[int], list[int] | None] | str

SENTENCE = "The quick brown fox, naïve and 漢字 alike, jumps over structured concurrency. "


def different_prompts(count: int) -> list[Asked]:
    dice = random.Random(0)
    return [
        (
            dice.choice((TextPrompt, partial(PairPrompt, "who? " * dice.choice((1, 1, 1, 30)))))(
                f"number {n}: " + SENTENCE * dice.choice((0, 0, 0, 1, 1, 1, 1, 2, 2, 4, 30))
            ),
            RenderingParams(
                truncate_to=dice.choice((None, 5, 17, 64, 256)),
                truncation_side=dice.choice(("left", "right")),
                add_special_tokens=dice.random() < 0.8,
                instruction=dice.choice(("", "query: ", "Represent this sentence: ")),
            ),
        )
        for n in range(count)
    ]


async def answer(renderer: Renderer, asked: Asked) -> Answer:
    try:
        rendered = await renderer.render(*asked)
    except InvalidRequestError as error:
        return str(error)
    return rendered.token_ids.tolist(), None if rendered.type_ids is None else rendered.type_ids.tolist()


async def answers_one_by_one(renderer: Renderer, prompts: Sequence[Asked]) -> list[Answer]:
    return [await answer(renderer, asked) for asked in prompts]


async def wrong_answers(renderer: Renderer, prompts: Sequence[Asked], expected: list[Answer], rounds: int) -> list[int]:
    """Which of the prompts got a wrong answer, when as many tasks take one after the other."""
    dice, wrong = random.Random(1), []
    todo = iter([dice.randrange(len(prompts)) for _ in range(rounds)])

    async def client() -> None:
        wrong.extend([index for index in todo if await answer(renderer, prompts[index]) != expected[index]])

    async with trio.open_nursery() as nursery:
        for _ in range(TASKS):
            nursery.start_soon(client)
    assert next(todo, None) is None
    return wrong


def renderer_over(tokenizer: Tokenizer, workers: int = WORKERS, max_model_len: int = 512) -> Renderer:
    texts = TextRenderer(TokenizerPool(tokenizer, workers), max_model_len=max_model_len, vocab_size=30_522)
    return Renderer(texts, Offload(render=workers))


def assert_all_kinds(answers: list[Answer]) -> None:
    """Else it would be easy."""
    lengths = {len(found[0]) for found in answers if isinstance(found, tuple)}
    assert len(lengths) > 20
    assert any(isinstance(found, str) for found in answers), "nothing was too long"


@sampled("rounds", [300, 3_000], keep=[300])
async def test_rounds_of_changing_truncation_from_sixteen_tasks(minilm: Path, rounds: int):
    text = (minilm / "tokenizer.json").read_text()
    prompts = different_prompts(500)
    alone = renderer_over(FastTokenizer(Backend.from_str(text), frozenset()), workers=1)
    expected = await answers_one_by_one(alone, prompts)
    assert_all_kinds(expected)
    renderer = renderer_over(FastTokenizer(Backend.from_str(text), frozenset()))
    assert await wrong_answers(renderer, prompts, expected, rounds) == []


@pytest.mark.parametrize("kind", [*FAST_KINDS[1:], "slow"])
async def test_a_thousand_rounds_with_tokenizers_of_other_kinds(kind: str):
    tokenizer = SlowTokenizer(ByT5Tokenizer()) if kind == "slow" else fast_tokenizer(kind)
    prompts = different_prompts(100)
    expected = await answers_one_by_one(renderer_over(tokenizer, 1), prompts)
    assert_all_kinds(expected)
    renderer = renderer_over(tokenizer)
    assert await wrong_answers(renderer, prompts, expected, 1000) == []
    assert repr(renderer.texts.tokenizers) == "<TokenizerPool 4 of 4 free>"


@define(eq=False)
class WatchedTokenizer:
    """Notes when two threads are in one copy; waits inside until all copies are in use."""

    inner: Tokenizer
    all_inside: threading.Barrier
    faults: list[str] = field(factory=list)
    inside: threading.Lock = field(factory=threading.Lock, init=False)
    calls: int = field(default=0, init=False)

    def encode(self, text: str, *, positions: bool = False) -> Encoded:
        if not self.inside.acquire(blocking=False):
            self.faults.append(text)
            return self.inner.encode(text, positions=positions)
        try:
            self.calls += 1
            self.all_inside.wait(timeout=60)
            return self.inner.encode(text, positions=positions)
        finally:
            self.inside.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def copy(self) -> "WatchedTokenizer":
        return WatchedTokenizer(self.inner.copy(), self.all_inside, self.faults)


async def test_a_slow_tokenizer_is_in_one_thread_at_a_time_while_its_copies_work():
    first = WatchedTokenizer(SlowTokenizer(ByT5Tokenizer()), threading.Barrier(WORKERS))
    renderer = renderer_over(first)
    async with trio.open_nursery() as nursery:
        for n in range(40 * WORKERS):
            nursery.start_soon(renderer.render, TextPrompt(f"number {n}"), RenderingParams())
    assert first.faults == []
    assert first.calls == 40, "the barrier lets no thread through before every copy is in use"


async def test_every_tokenizer_comes_back_after_errors():
    renderer = renderer_over(fast_tokenizer("word-piece"), workers=2, max_model_len=16)
    for text, error in (("word " * 50, ContextLengthError), ("\udc00", InvalidRequestError), ("", None)) * 5:
        params = RenderingParams(add_special_tokens=error is not None)
        with pytest.raises(error or InvalidRequestError):
            await renderer.render(TextPrompt(text), params)
    assert repr(renderer.texts.tokenizers) == "<TokenizerPool 2 of 2 free>"
    assert renderer.offload.statistics()["render"].borrowed == 0


def test_a_lent_tokenizer_is_lent_once():
    pool = TokenizerPool(SlowTokenizer(ByT5Tokenizer()), 2)
    with pool.lend() as one, pool.lend() as other:
        assert one is not other
        assert repr(pool) == "<TokenizerPool 0 of 2 free>"
    assert repr(pool) == "<TokenizerPool 2 of 2 free>"
