"""Tokenizers under many threads: each lent to one at a time, all of them given back."""

import threading

import pytest
import trio
from attrs import define, field
from transformers import ByT5Tokenizer

from tests.rendering.text.test_tokenizer import FAST_KINDS, fast_tokenizer
from trio_pool_serve.errors import ContextLengthError, InvalidRequestError
from trio_pool_serve.prompts import Prompt, RenderingParams, TextPrompt, TruncationSide
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.rendering.text.slow_tokenizer import SlowTokenizer
from trio_pool_serve.rendering.text.text_renderer import TextRenderer
from trio_pool_serve.rendering.text.tokenizer import Encoded, Tokenizer, TokenizerPool
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import TokenIds

WORKERS = 4

PROMPTS = [
    (
        TextPrompt(f"prompt number {n}: " + "the quick brown fox, naïve and 漢字 " * (n % 40)),
        RenderingParams(
            truncate_to=(None, 5, 40, 512)[n % 4],
            truncation_side=("right", "left")[n // 4 % 2],
            add_special_tokens=n % 3 > 0,
        ),
    )
    for n in range(400)
]


def renderer_over(tokenizer: Tokenizer, *, workers: int = WORKERS, max_model_len: int = 100_000) -> Renderer:
    texts = TextRenderer(TokenizerPool(tokenizer, workers), max_model_len=max_model_len, vocab_size=1000)
    return Renderer(texts, Offload(render=workers))


async def render_all(renderer: Renderer, asked: list[tuple[Prompt, RenderingParams]]) -> list[list[int]]:
    rendered: dict[int, list[int]] = {}

    async def one(index: int) -> None:
        rendered[index] = (await renderer.render(*asked[index])).token_ids.tolist()

    async with trio.open_nursery() as nursery:
        for index in range(len(asked)):
            nursery.start_soon(one, index)
    return [rendered[index] for index in range(len(asked))]


def token_ids_alone(tokenizer: Tokenizer, prompt: TextPrompt, params: RenderingParams) -> list[int]:
    special = tokenizer.special_tokens if params.add_special_tokens else 0
    keep = (params.truncate_to or 100_000) - special
    encoded = tokenizer.encode(prompt.text)
    return tokenizer.finish(
        encoded, keep, params.truncation_side, add_special_tokens=params.add_special_tokens
    ).tolist()


@pytest.mark.parametrize("kind", [*FAST_KINDS, "slow"])
async def test_concurrent_renders_with_mixed_truncation_give_what_one_alone_gives(kind):
    tokenizer = SlowTokenizer(ByT5Tokenizer()) if kind == "slow" else fast_tokenizer(kind)
    expected = [token_ids_alone(tokenizer, *asked) for asked in PROMPTS]
    renderer = renderer_over(tokenizer)
    assert await render_all(renderer, PROMPTS) == expected
    assert repr(renderer.texts.tokenizers) == "<TokenizerPool 4 of 4 free>"


@define(eq=False)
class WatchedTokenizer:
    """Notes when two threads are in one copy; waits inside until all copies are in use."""

    inner: Tokenizer
    all_inside: threading.Barrier
    faults: list[str] = field(factory=list)
    inside: threading.Lock = field(factory=threading.Lock, init=False)
    calls: int = field(default=0, init=False)

    @property
    def special_tokens(self) -> int:
        return self.inner.special_tokens

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

    def finish(self, encoded: Encoded, keep: int, side: TruncationSide, *, add_special_tokens: bool) -> TokenIds:
        return self.inner.finish(encoded, keep, side, add_special_tokens=add_special_tokens)

    def is_special(self, token_id: int) -> bool:
        return self.inner.is_special(token_id)

    def copy(self) -> "WatchedTokenizer":
        return WatchedTokenizer(self.inner.copy(), self.all_inside, self.faults)


async def test_a_slow_tokenizer_is_in_one_thread_at_a_time_while_its_copies_work():
    first = WatchedTokenizer(SlowTokenizer(ByT5Tokenizer()), threading.Barrier(WORKERS))
    renderer = renderer_over(first)
    asked = [(TextPrompt(f"number {n}"), RenderingParams()) for n in range(40 * WORKERS)]
    rendered = await render_all(renderer, asked)
    assert first.faults == []
    assert rendered == [token_ids_alone(first.inner, *one) for one in asked]
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
