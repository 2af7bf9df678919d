"""Prompts to token ids: what is refused, what is cut, what is put in front."""

import itertools
import threading
from functools import partial

import numpy as np
import pybase64
import pytest
import trio
from tokenizers import Tokenizer as Backend
from trio.testing import wait_all_tasks_blocked

from tests.model_folders import VOCABULARY, ids_of, numpy_file
from trio_pool_serve.errors import ContextLengthError, InvalidRequestError
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.prompts import ChunkedPrompt, EmbedsPrompt, PairPrompt, RenderingParams, TextPrompt, TokensPrompt
from trio_pool_serve.rendering.prompt_embeds import EmbedsFormat
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.rendering.text.fast_tokenizer import FastTokenizer
from trio_pool_serve.rendering.text.text_renderer import (
    ALWAYS_READ,
    MAX_KNOWN_INSTRUCTIONS,
    PromptToRender,
    TextRenderer,
)
from trio_pool_serve.rendering.text.tokenizer import Tokenizer, TokenizerPool
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Client

pytestmark = pytest.mark.unit
MAX_MODEL_LEN = 64


@pytest.fixture(scope="module")
def tokenizer(scripted_folder) -> Tokenizer:
    """One token per word; [CLS] before, [SEP] after."""
    return load_tokenizer(read_model_folder(scripted_folder))


@pytest.fixture
def renderer(tokenizer: Tokenizer) -> Renderer:
    return make_renderer(tokenizer)


def make_renderer(tokenizer: Tokenizer, offload: Offload | None = None, **settings) -> Renderer:
    settings = {"max_model_len": MAX_MODEL_LEN, "vocab_size": len(VOCABULARY)} | settings
    return Renderer(TextRenderer(TokenizerPool(tokenizer, 1), **settings), offload or Offload())


def words(count: int) -> str:
    return " ".join(f"w{n % 200}" for n in range(count))


async def token_ids(renderer: Renderer, text: str, **params) -> list[int]:
    return (await renderer.render(TextPrompt(text), RenderingParams(**params))).token_ids.tolist()


async def ids_kept(renderer: Renderer, ids: list[int], **params) -> list[int]:
    rendered = await renderer.render(TokensPrompt(np.array(ids, dtype=np.int64)), RenderingParams(**params))
    assert rendered.token_ids.dtype == np.int32
    return rendered.token_ids.tolist()


BARE = {"add_special_tokens": False}
LEFT = {"truncation_side": "left"}
QUERY = {"instruction": "query : "}


@pytest.mark.parametrize(
    ("text", "params", "expected"),
    [
        ("hello world", {}, "[CLS] hello world [SEP]"),
        ("hello world", BARE, "hello world"),
        ("  ", {}, "[CLS] [SEP]"),
        (words(9), {"truncate_to": 5}, "[CLS] w0 w1 w2 [SEP]"),
        (words(9), {"truncate_to": 5, **LEFT}, "[CLS] w6 w7 w8 [SEP]"),
        (words(9), {"truncate_to": 2, **LEFT, **BARE}, "w7 w8"),
        ("hello", {"truncate_to": 1, **BARE}, "hello"),
        ("hello", QUERY, "[CLS] query : hello [SEP]"),
        ("hello", {"truncate_to": 4, **QUERY}, "[CLS] query : [SEP]"),
        (words(62), {}, f"[CLS] {words(62)} [SEP]"),
        (words(64), BARE, words(64)),
    ],
)
async def test_texts_are_truncated_with_their_special_tokens_and_instructions(renderer, text, params, expected):
    assert await token_ids(renderer, text, **params) == ids_of(expected)


TOO_LONG = r"An input has {} tokens\. This model's maximum context length is 64 tokens"
NONE_LEFT = "An input is truncated to {} tokens, which 2 special tokens fill"


async def test_several_texts_are_rendered_as_each_of_them_alone(renderer, monkeypatch):
    together: list[list[str]] = []
    encode_all = FastTokenizer.encode_all
    monkeypatch.setattr(
        FastTokenizer, "encode_all", lambda self, texts: together.append([*texts]) or encode_all(self, texts)
    )
    texts = ("hello", "", "hello", "w1 " * 400, words(9), *("w2" * n for n in (1, 600)))
    settings = ({}, BARE, {"truncate_to": 5}, {"truncate_to": 5, **LEFT}, QUERY, {"max_text_tokens": 2})
    prompts: list[PromptToRender] = [
        (TextPrompt(text), RenderingParams(**({"truncate_to": 60} | params)), False)
        for text, params in itertools.product(texts, settings)
        if text or params != BARE
    ]
    others = (PairPrompt("hello", "world"), ChunkedPrompt("hello world", ((0, 5), (6, 11))), TokensPrompt(np.ones(3)))
    prompts[3:3] = [
        (TextPrompt(words(200)), RenderingParams(), True),
        *((each, RenderingParams(), False) for each in others),
    ]
    several = await renderer.render_plain(prompts)
    assert len(together[0]) > 20, "in one call"
    assert max(map(len, together[0])) <= ALWAYS_READ
    for prompt, rows in zip(prompts, several, strict=True):
        (alone,) = await renderer.render_plain([prompt])
        assert str(rows) == str(alone)
        assert [row.token_ids.tolist() for row in rows] == [row.token_ids.tolist() for row in alone]


async def test_the_text_that_is_refused_among_several_is_the_one_that_the_error_names(renderer):
    wrong = TextPrompt("w1 \ud800")
    prompts = [(prompt, RenderingParams(), False) for prompt in (TextPrompt("hello"), wrong, TextPrompt("world"))]
    with pytest.raises(InvalidRequestError, match="not valid Unicode") as refused:
        await renderer.render_plain(prompts)
    assert prompts[refused.value.row][0] is wrong


@pytest.mark.parametrize(
    ("text", "params", "error", "told", "field"),
    [
        (words(63), {}, ContextLengthError, TOO_LONG.format(65), "prompts"),
        (words(62), QUERY, ContextLengthError, TOO_LONG.format(66), "prompts"),
        (words(100_000), {}, ContextLengthError, TOO_LONG.format(r"more than \d{3,4}"), "prompts"),
        ("hello", {"truncate_to": 1}, InvalidRequestError, NONE_LEFT.format(1), "truncate_to"),
        ("hello", {"truncate_to": 2}, InvalidRequestError, NONE_LEFT.format(2), "truncate_to"),
        ("  ", BARE, InvalidRequestError, "no tokens", "prompts"),
        *(
            (text, {}, InvalidRequestError, "not valid Unicode", "prompts")
            for text in ("\ud83d", "a fine text " * 10 + "\udc00", "\udfff" * 10_000)
        ),
    ],
)
async def test_texts_that_cannot_be_rendered_are_refused(renderer, text, params, error, told, field):
    with pytest.raises(error, match=told) as caught:
        await token_ids(renderer, text, **params)
    assert caught.value.field == field


async def test_instruction_tokens_are_counted_without_the_trailing_special_token(tokenizer, renderer):
    """Unless the model pools them."""
    leaves_out = make_renderer(tokenizer, pools_instruction=False)
    blanks = {"instruction": "  "}
    counts = [(QUERY, 3), (QUERY | BARE, 2), ({"instruction": ""}, 0), (blanks, 1), (blanks | BARE, 0)]
    for params, expected in counts * 2:  # the second time from memory
        for each, counted in ((leaves_out, expected), (renderer, 0)):
            assert (await each.render(TextPrompt("hello"), RenderingParams(**params))).instruction_tokens == counted


async def test_a_limited_number_of_instructions_is_remembered(tokenizer):
    renderer = make_renderer(tokenizer, pools_instruction=False, offload=Offload(in_threads=False))
    for n in range(MAX_KNOWN_INSTRUCTIONS + 20):
        rendered = await renderer.render(TextPrompt("hello"), RenderingParams(instruction=f"client {n} : "))
        assert rendered.instruction_tokens == 4
    assert renderer.texts._instruction_tokens.cache_info().currsize == MAX_KNOWN_INSTRUCTIONS


@pytest.mark.parametrize(
    ("ids", "params", "expected"),
    [
        ([7, 0, 7], {}, [7, 0, 7]),
        ([0, len(VOCABULARY) - 1], {}, [0, len(VOCABULARY) - 1]),
        ([1] * 64, {}, [1] * 64),
        ([*range(100)], {"truncate_to": 3}, [0, 1, 2]),
        ([*range(100)], {"truncate_to": 3, **LEFT}, [97, 98, 99]),
        ([5, 6], {"truncate_to": 3, **LEFT}, [5, 6]),
    ],
)
async def test_token_ids_are_taken_as_they_are_or_truncated_without_a_thread(renderer, ids, params, expected):
    renderer.offload._limiters["render"].acquire_nowait()
    assert await ids_kept(renderer, ids, **params) == expected


OUTSIDE = [-1, len(VOCABULARY), 2**31 + 5, 2**40, -(2**63)]


@pytest.mark.parametrize(
    ("ids", "error", "told"),
    [
        *(
            (
                [1, outside, 2],
                InvalidRequestError,
                f"token id {outside}; this model's vocabulary has the ids 0 to {len(VOCABULARY) - 1}",
            )
            for outside in OUTSIDE
        ),
        ([1] * 65, ContextLengthError, TOO_LONG.format(65)),
        ([], InvalidRequestError, "no tokens"),
    ],
)
async def test_token_ids_that_cannot_be_rendered_are_refused(renderer, ids, error, told):
    with pytest.raises(error, match=told):
        await ids_kept(renderer, ids)


LONG = TextPrompt("hello " * 100)
ASKED = {
    "texts": lambda renderer: renderer.render_plain([(LONG, RenderingParams(truncate_to=9), False)], 2),
    "a pair": lambda renderer: renderer.render(PairPrompt("hello", "world"), RenderingParams(), Client("b")),
    "token embeddings": lambda renderer: renderer.render(EmbedsPrompt(EMBEDS), RenderingParams(), Client("b")),
    "a text to take apart": lambda renderer: renderer.tokenize("hello", 2, add_special_tokens=True),
    "ids": lambda renderer: renderer.pieces(np.array([7, 8]), 2),
    "ids to put together": lambda renderer: renderer.detokenize(np.array([7, 8]), 2, skip_special_tokens=True),
}
EMBEDS = pybase64.b64encode(numpy_file(np.ones((3, 2), dtype=np.float32)))


@pytest.mark.parametrize("asked", ASKED)
async def test_a_client_does_not_wait_for_what_another_has_waiting(tokenizer, asked):
    """Another has 20 waiting; the one of them that is ready comes first, and one more may end before this is told."""
    renderer = make_renderer(tokenizer)
    renderer.embeds_format = EmbedsFormat(width=2, max_rows=4)
    leave, inside, done, before = threading.Event(), trio.Event(), [], []
    render = partial(renderer.offload.run, "render", client=1)

    def occupy() -> None:
        trio.from_thread.run_sync(inside.set)
        leave.wait(60)

    async def ask() -> None:
        await ASKED[asked](renderer)
        before.append(len(done))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(render, occupy)
        await inside.wait()
        for number in range(20):
            nursery.start_soon(render, partial(done.append, number))
        await wait_all_tasks_blocked()
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        assert renderer.offload.statistics()["render"].waiting == 21
        leave.set()
    assert before[0] <= 2


class HeldTokenizer(FastTokenizer):
    """Waits in ``encode`` until it is let go."""

    entered: threading.Event
    let_go: threading.Event

    def encode(self, text, *, positions=False):
        self.entered.set()
        self.let_go.wait(60)
        return super().encode(text, positions=positions)


async def test_one_that_tokenises_can_be_cancelled_at_once_and_its_thread_gives_everything_back(scripted_folder):
    held = HeldTokenizer(Backend.from_file(str(scripted_folder / "tokenizer.json")), frozenset())
    held.entered, held.let_go = threading.Event(), threading.Event()
    renderer = make_renderer(held)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(renderer.render, TextPrompt("hello"), RenderingParams())
            await trio.to_thread.run_sync(held.entered.wait, limiter=trio.CapacityLimiter(1))
            scope.cancel()
    assert repr(renderer.texts.tokenizers) == "<TokenizerPool 0 of 1 free>"
    assert renderer.offload.statistics()["render"].borrowed == 1
    held.let_go.set()
    await renderer.render(TextPrompt("world"), RenderingParams())  # has to wait for that thread
    assert repr(renderer.texts.tokenizers) == "<TokenizerPool 1 of 1 free>"
    assert renderer.offload.statistics()["render"].borrowed == 0


@pytest.mark.parametrize("instruction", ["w9 ", "w9"])
async def test_every_window_is_behind_the_instruction(tokenizer: Tokenizer, instruction: str):
    """Without the blank, the instruction and the text would become one word."""
    renderer = make_renderer(tokenizer, max_model_len=5)
    params = RenderingParams(instruction=instruction)
    (windows,) = await renderer.render_plain([(TextPrompt("w1 w2 w3 w4 w5"), params, True)])
    assert [window.token_ids.tolist() for window in windows] == [
        ids_of(f"[CLS] w9 {text} [SEP]") for text in ("w1 w2", "w3 w4", "w5")
    ]
