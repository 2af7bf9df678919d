"""Prompts to token ids: what is refused, what is cut, what is put in front."""

import io
import threading
from functools import partial

import numpy as np
import pybase64
import pytest
import trio
from tokenizers import Tokenizer as Backend
from trio.testing import wait_all_tasks_blocked

from tests.model_folders import VOCABULARY
from trio_pool_serve.errors import ContextLengthError, InvalidRequestError
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.prompts import EmbedsPrompt, PairPrompt, RenderingParams, TextPrompt, TokensPrompt
from trio_pool_serve.rendering.embeds.prompt_embeds import EmbedsFormat
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.rendering.text.fast_tokenizer import FastTokenizer
from trio_pool_serve.rendering.text.text_renderer import MAX_KNOWN_INSTRUCTIONS, TextRenderer
from trio_pool_serve.rendering.text.tokenizer import Tokenizer, TokenizerPool
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Client

pytestmark = pytest.mark.unit

CLS, SEP = VOCABULARY["[CLS]"], VOCABULARY["[SEP]"]
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


def ids_of(*words: str) -> list[int]:
    return [VOCABULARY[word] for word in words]


def words(count: int) -> str:
    return " ".join(f"w{n % 200}" for n in range(count))


async def token_ids(renderer: Renderer, text: str, **params) -> list[int]:
    return (await renderer.render(TextPrompt(text), RenderingParams(**params))).token_ids.tolist()


async def ids_kept(renderer: Renderer, ids: list[int], **params) -> list[int]:
    prompt = TokensPrompt(np.array(ids, dtype=np.int64))
    return (await renderer.render(prompt, RenderingParams(**params))).token_ids.tolist()


# -- texts --------------------------------------------------------------------------------------------


async def test_a_text_gets_its_special_tokens_unless_they_are_not_wanted(renderer):
    assert await token_ids(renderer, "hello world") == [CLS, *ids_of("hello", "world"), SEP]
    assert await token_ids(renderer, "hello world", add_special_tokens=False) == ids_of("hello", "world")


async def test_truncation_counts_the_special_tokens(renderer):
    assert await token_ids(renderer, words(9), truncate_to=5) == [CLS, *ids_of("w0", "w1", "w2"), SEP]
    assert await token_ids(renderer, words(9), truncate_to=5, truncation_side="left") == [
        CLS,
        *ids_of("w6", "w7", "w8"),
        SEP,
    ]
    bare = await token_ids(renderer, words(9), truncate_to=2, truncation_side="left", add_special_tokens=False)
    assert bare == ids_of("w7", "w8")


async def test_a_text_as_long_as_the_model_takes_is_taken_and_one_token_more_is_not(renderer):
    assert len(await token_ids(renderer, words(62))) == MAX_MODEL_LEN
    with pytest.raises(
        ContextLengthError, match=r"context length is 64 tokens\. However, an input has 65 tokens"
    ) as caught:
        await token_ids(renderer, words(63))
    assert caught.value.field == "prompts"
    assert len(await token_ids(renderer, words(64), add_special_tokens=False)) == MAX_MODEL_LEN


async def test_of_a_huge_text_only_a_lower_bound_is_told(renderer):
    with pytest.raises(
        ContextLengthError, match=r"context length is 64 tokens\. However, an input has more than \d{3,4} tokens"
    ):
        await token_ids(renderer, words(100_000))


@pytest.mark.parametrize("limit", [1, 2])
async def test_truncating_to_the_special_tokens_alone_is_refused(renderer, limit):
    with pytest.raises(InvalidRequestError, match=f"Truncating to {limit} tokens leaves none for the input") as caught:
        await token_ids(renderer, "hello", truncate_to=limit)
    assert caught.value.field == "truncate_to"
    assert await token_ids(renderer, "hello", truncate_to=limit, add_special_tokens=False) == ids_of("hello")


async def test_a_text_without_tokens_is_refused_only_if_nothing_surrounds_it(renderer):
    assert await token_ids(renderer, "  ") == [CLS, SEP]
    with pytest.raises(InvalidRequestError, match="no tokens"):
        await token_ids(renderer, "  ", add_special_tokens=False)


@pytest.mark.parametrize("text", ["\ud83d", "a fine text " * 10 + "\udc00", "\udfff" * 10_000])
async def test_lone_surrogates_are_the_requests_fault(renderer, text):
    with pytest.raises(InvalidRequestError, match="not valid Unicode") as caught:
        await token_ids(renderer, text)
    assert caught.value.field == "prompts"


# -- instructions -------------------------------------------------------------------------------------


async def test_an_instruction_goes_in_front_and_is_cut_with_the_text(renderer):
    assert await token_ids(renderer, "hello", instruction="query : ") == [CLS, *ids_of("query", ":", "hello"), SEP]
    assert await token_ids(renderer, "hello", instruction="query : ", truncate_to=4) == [
        CLS,
        *ids_of("query", ":"),
        SEP,
    ]


async def test_an_instruction_counts_towards_the_length(renderer):
    with pytest.raises(ContextLengthError, match="has 66 tokens"):
        await token_ids(renderer, words(62), instruction="query : ")


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"instruction": "query : "}, 3),
        ({"instruction": "query : ", "add_special_tokens": False}, 2),
        ({"instruction": ""}, 0),
        ({"instruction": "  "}, 1),
        ({"instruction": "  ", "add_special_tokens": False}, 0),
    ],
)
async def test_instruction_tokens_are_counted_without_the_trailing_special_token(tokenizer, params, expected):
    renderer = make_renderer(tokenizer, pools_instruction=False)
    for _ in range(2):  # the second time from memory
        rendered = await renderer.render(TextPrompt("hello"), RenderingParams(**params))
        assert rendered.instruction_tokens == expected


async def test_counts_with_and_without_special_tokens_are_not_confused(tokenizer):
    renderer = make_renderer(tokenizer, pools_instruction=False)
    counts = [
        (
            await renderer.render(TextPrompt("hello"), RenderingParams(instruction="query : ", add_special_tokens=add))
        ).instruction_tokens
        for add in (True, False, True)
    ]
    assert counts == [3, 2, 3]


async def test_instruction_tokens_are_not_counted_for_models_that_pool_them(renderer):
    rendered = await renderer.render(TextPrompt("hello"), RenderingParams(instruction="query : "))
    assert rendered.instruction_tokens == 0


async def test_no_more_than_so_many_instructions_are_remembered(tokenizer):
    renderer = make_renderer(tokenizer, pools_instruction=False, offload=Offload(in_threads=False))
    for n in range(MAX_KNOWN_INSTRUCTIONS + 20):
        rendered = await renderer.render(TextPrompt("hello"), RenderingParams(instruction=f"client {n} : "))
        assert rendered.instruction_tokens == 4
    assert len(renderer.texts._instruction_tokens) == MAX_KNOWN_INSTRUCTIONS


# -- token ids ----------------------------------------------------------------------------------------


async def test_token_ids_are_taken_as_they_are(renderer):
    rendered = await renderer.render(TokensPrompt(np.array([7, 0, 7], dtype=np.int64)), RenderingParams())
    assert rendered.token_ids.tolist() == [7, 0, 7]
    assert rendered.token_ids.dtype == np.int32


@pytest.mark.parametrize("outside", [-1, len(VOCABULARY), 2**31 + 5, 2**40, -(2**63)])
async def test_a_token_id_outside_the_vocabulary_is_refused(renderer, outside):
    with pytest.raises(InvalidRequestError, match=f"Token id {outside} is outside .* vocabulary of {len(VOCABULARY)}"):
        await ids_kept(renderer, [1, outside, 2])


async def test_the_last_token_id_of_the_vocabulary_is_inside(renderer):
    assert await ids_kept(renderer, [0, len(VOCABULARY) - 1]) == [0, len(VOCABULARY) - 1]


async def test_too_many_token_ids_are_refused_with_both_lengths(renderer):
    assert len(await ids_kept(renderer, [1] * 64)) == 64
    with pytest.raises(ContextLengthError, match=r"context length is 64 tokens\. However, an input has 65 tokens"):
        await ids_kept(renderer, [1] * 65)


async def test_token_ids_are_truncated_at_the_side_asked_for(renderer):
    assert await ids_kept(renderer, [*range(100)], truncate_to=3) == [0, 1, 2]
    assert await ids_kept(renderer, [*range(100)], truncate_to=3, truncation_side="left") == [97, 98, 99]
    assert await ids_kept(renderer, [5, 6], truncate_to=3, truncation_side="left") == [5, 6]


async def test_no_token_ids_are_refused(renderer):
    with pytest.raises(InvalidRequestError, match="no tokens"):
        await ids_kept(renderer, [])


async def test_token_ids_need_no_thread(renderer):
    limiter = renderer.offload._limiters["render"]
    limiter.acquire_nowait()
    assert await ids_kept(renderer, [1, 2]) == [1, 2]
    limiter.release()


# -- threads and cancellation -------------------------------------------------------------------------


async def test_renders_on_the_loop_when_told_to(tokenizer):
    renderer = make_renderer(tokenizer, offload=Offload(in_threads=False))
    assert await token_ids(renderer, "hello") == [CLS, *ids_of("hello"), SEP]


async def test_who_waits_for_a_thread_leaves_at_once_and_holds_nothing(renderer):
    leave, inside = threading.Event(), trio.Event()

    def occupy() -> None:
        trio.from_thread.run_sync(inside.set)
        leave.wait(60)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(renderer.offload.run, "render", occupy)
        await inside.wait()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as waiting:
                waiting.start_soon(renderer.render, TextPrompt("hello"), RenderingParams())
                await wait_all_tasks_blocked()
                assert renderer.offload.statistics()["render"].waiting == 1
                scope.cancel()
        assert scope.cancelled_caught
        stats = renderer.offload.statistics()["render"]
        assert (stats.borrowed, stats.waiting) == (1, 0), "the thread is still occupied: it was not waited for"
        assert repr(renderer.texts.tokenizers) == "<TokenizerPool 1 of 1 free>"
        leave.set()
    assert renderer.offload.statistics()["render"].borrowed == 0
    assert await token_ids(renderer, "hello") == [CLS, *ids_of("hello"), SEP]


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return pybase64.b64encode(file.getvalue())


EMBEDDINGS = npy(np.ones((3, 2), dtype=np.float32))
LONG = TextPrompt("hello " * 100)
ASKED = {
    "texts": lambda renderer: renderer.render_plain([(LONG, RenderingParams(truncate_to=9), False)], 2),
    "a pair": lambda renderer: renderer.render(PairPrompt("hello", "world"), RenderingParams(), Client("b")),
    "token embeddings": lambda renderer: renderer.render(EmbedsPrompt(EMBEDDINGS), RenderingParams(), Client("b")),
    "a text to shorten": lambda renderer: renderer.shorten("hello world", 1, 2),
    "a text to take apart": lambda renderer: renderer.tokenize("hello", 2, add_special_tokens=True),
    "ids": lambda renderer: renderer.pieces(np.array([7, 8]), 2),
    "ids to put together": lambda renderer: renderer.detokenize(np.array([7, 8]), 2, skip_special_tokens=True),
}


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
    expected = [["w1", "w2"], ["w3", "w4"], ["w5"]]
    assert [window.token_ids.tolist() for window in windows] == [
        [CLS, *ids_of("w9", *words), SEP] for words in expected
    ]
