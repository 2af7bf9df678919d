"""Two texts as one input: joined, cut and numbered as the tokenizers library does it."""

import random
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.lanes import sampled
from tests.model_folders import VOCABULARY
from tests.models.classifier_families import FAMILIES, reranker_tokenizer
from tests.rendering.test_renderer import MAX_MODEL_LEN, make_renderer, words
from trio_pool_serve.errors import ContextLengthError, InvalidRequestError
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.generative_reranker import RerankerTemplate
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.prompts import PairPrompt, RenderingParams
from trio_pool_serve.rendering.chat.chat_pair import ChatFormat, ChatPair
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.rendering.text.fast_tokenizer import FastTokenizer
from trio_pool_serve.rendering.text.slow_tokenizer import SlowTokenizer
from trio_pool_serve.rendering.text.tokenizer import ModelChatTemplates
from trio_pool_serve.types import RenderedPrompt

each_side = pytest.mark.parametrize("side", ["right", "left"])


@pytest.fixture
def slow(tmp_path: Path) -> Any:
    """One token per letter, and no special tokens."""
    vocab = tmp_path / "vocab.json"
    vocab.write_text('{"<pad>": 0, "<unk>": 1, "a": 2, "b": 3, "|": 4, "<s>": 5, "</s>": 6}')
    return transformers.Wav2Vec2CTCTokenizer(str(vocab), truncation_side="right")


def fast(theirs: Any) -> FastTokenizer:
    backend = theirs.backend_tokenizer.from_str(theirs.backend_tokenizer.to_str())
    return FastTokenizer(backend, frozenset(), has_segments="token_type_ids" in theirs.model_input_names)


async def render(renderer: Renderer, pair: PairPrompt, **params: Any) -> RenderedPrompt:
    return await renderer.render(pair, RenderingParams(**params))


def segments_of(rendered: RenderedPrompt) -> list[int]:
    return [0] * len(rendered.token_ids) if rendered.type_ids is None else rendered.type_ids.tolist()


@pytest.fixture(scope="module")
def word_renderer(scripted_folder: Path) -> Renderer:
    """One token per word, and no template for pairs: two texts get no special tokens at all."""
    return make_renderer(load_tokenizer(read_model_folder(scripted_folder)))


@pytest.fixture(scope="module")
def bert() -> Any:
    return FAMILIES["bert"].tokenizer()


@pytest.fixture(scope="module")
def renderer(bert: Any) -> Renderer:
    return make_renderer(fast(bert))


@pytest.mark.parametrize("name", FAMILIES)
@each_side
async def test_every_family_joins_and_cuts_as_transformers(name: str, side: Any):
    theirs = FAMILIES[name].tokenizer()
    theirs.truncation_side = side
    renderer = make_renderer(fast(theirs), max_model_len=70)
    chosen = random.Random(name)
    letters = "a nursery owns its tasks, größer 東京 and Yes every wait can be cancelled"
    for _ in range(40):
        first, second = ("".join(chosen.choices(letters, k=chosen.randrange(1, 120))) for _ in range(2))
        limit = chosen.randrange(6, 70)
        for special in ({"add_special_tokens": True}, {"add_special_tokens": False}):
            expected = theirs(first, second, truncation="longest_first", max_length=limit, **special)
            cut = {"truncate_to": limit, "truncation_side": side, **special}
            ours = await render(renderer, PairPrompt(first, second), **cut)
            assert ours.token_ids.tolist() == expected["input_ids"]
            types = expected.get("token_type_ids", [0] * len(ours.token_ids))
            assert not special["add_special_tokens"] or segments_of(ours) == types


@each_side
@sampled("limit", [20, 21, 63], keep=[21])
@pytest.mark.parametrize("lengths", [(900, 3), (3, 900), (900, 901), (901, 900), (900, 900), (12, 900)])
async def test_excerpts_do_not_show(bert: Any, renderer: Renderer, lengths: tuple[int, int], limit: int, side: Any):
    bert.truncation_side = side
    pair = PairPrompt(*map(words, lengths))
    expected = bert(pair.first, pair.second, truncation="longest_first", max_length=limit)
    ours = await render(renderer, pair, truncate_to=limit, truncation_side=side)
    assert (ours.token_ids.tolist(), segments_of(ours)) == (expected["input_ids"], expected["token_type_ids"])


async def test_a_pair_that_is_too_long_is_refused(renderer: Renderer, bert: Any):
    fits = PairPrompt(*["yes " * 12] * 2)
    assert len((await render(renderer, fits)).token_ids) <= MAX_MODEL_LEN
    length = len(bert("yes " * 40, "yes " * 40)["input_ids"])
    with pytest.raises(
        ContextLengthError, match=f"An input has {length} tokens. This model's maximum context length is 64 tokens"
    ):
        await render(renderer, PairPrompt("yes " * 40, "yes " * 40))
    for pair in (PairPrompt("yes", words(100_000)), PairPrompt(words(100_000), "yes")):
        with pytest.raises(ContextLengthError, match="has more than"):
            await render(renderer, pair)


async def test_truncating_to_the_special_tokens_alone_is_refused(renderer: Renderer):
    for limit in (1, 2, 3):
        with pytest.raises(InvalidRequestError, match=f"truncated to {limit} tokens, which 3 special tokens fill"):
            await render(renderer, PairPrompt("yes", "no"), truncate_to=limit)


@each_side
async def test_each_text_is_cut_to_its_own_limit_first(word_renderer: Renderer, side: Any):
    """The beginning is kept, whatever side the whole is cut at."""

    async def cut(first: int, second: int, **params: Any) -> list[int]:
        pair = PairPrompt(words(50), words(3000), max_first_tokens=first, max_second_tokens=second)
        ids = (await render(word_renderer, pair, truncation_side=side, **params)).token_ids
        return (ids - VOCABULARY["w0"]).tolist()

    assert await cut(3, 2) == [0, 1, 2, 0, 1]
    assert len(await cut(4, 60)) == 64
    for first, second in ((5, 60), (4, 150)):
        with pytest.raises(ContextLengthError, match=f"has {first + second} tokens"):
            await cut(first, second)
    assert await cut(5, 60, truncate_to=10) == [*range(5), *(range(5) if side == "right" else range(55, 60))]


async def test_an_instruction_stands_before_the_first_text_and_is_not_cut_with_it(word_renderer: Renderer):
    pair = PairPrompt(words(50), "world", max_first_tokens=2)
    rendered = await render(word_renderer, pair, instruction="query : ")
    expected = [VOCABULARY[word] for word in ("query", ":", "w0", "w1", "world")]
    assert rendered.token_ids.tolist() == expected


async def test_half_of_a_surrogate_pair_and_texts_without_tokens_are_the_clients_fault(
    renderer: Renderer, word_renderer: Renderer
):
    for pair in (PairPrompt("\ud83d", "yes"), PairPrompt("yes", "\ud83d"), PairPrompt("\ud83d", "x", 3, 3)):
        with pytest.raises(InvalidRequestError, match="not valid Unicode"):
            await render(renderer, pair)
    with pytest.raises(InvalidRequestError, match="no tokens"):
        await render(word_renderer, PairPrompt("", " "))


async def test_segments_are_left_out_for_models_without_them(bert: Any):
    for has_segments in (True, False):
        renderer = make_renderer(FastTokenizer(fast(bert)._backend, frozenset(), has_segments=has_segments))
        assert ((await render(renderer, PairPrompt("yes", "no"))).type_ids is not None) == has_segments


async def test_a_tokenizer_written_in_python_joins_pairs_by_its_own_methods(slow: Any):
    renderer, chosen = make_renderer(SlowTokenizer(slow), max_model_len=200), random.Random(6)
    for _ in range(200):
        first, second, limit = "ab" * chosen.randrange(1, 40), "b" * chosen.randrange(1, 80), chosen.randrange(2, 200)
        expected = slow(first, second, truncation="longest_first", max_length=limit)
        ours = await render(renderer, PairPrompt(first, second), truncate_to=limit)
        assert ours.token_ids.tolist() == expected["input_ids"]
    short = await render(renderer, PairPrompt("ab" * 20, "b" * 40, 3, 2))
    assert short.token_ids.tolist() == [2, 3, 2, 3, 3]


async def test_the_frame_is_whole_and_the_body_is_cut():
    theirs = reranker_tokenizer()
    tokenizer = fast(theirs)
    judge = RerankerTemplate()
    prefix, suffix = (theirs.encode(text, add_special_tokens=False) for text in (judge.prefix, judge.suffix))
    frame = len(prefix) + len(suffix)
    renderer = make_renderer(tokenizer, max_model_len=frame + 30, pair_format=judge)
    pair = PairPrompt("who", words(5000))
    for side in ("right", "left"):
        rendered = await render(renderer, pair, truncate_to=frame + 20, truncation_side=side)
        ids = rendered.token_ids.tolist()
        body = theirs.encode(judge.body("who", pair.second, ""))
        assert ids == prefix + (body[:20] if side == "right" else body[-20:]) + suffix
    with pytest.raises(ContextLengthError, match="has more than"):
        await render(renderer, pair)
    with pytest.raises(InvalidRequestError, match=f"which {frame} template tokens fill"):
        await render(renderer, pair, truncate_to=frame)


TEMPLATE = (
    "{% for message in messages %}{% if 'forbidden' in message.content %}{{ raise_exception('no such word, please') }}"
    "{% endif %}<|im_start|>{{ message.role }}: {{ message.content }}{% endfor %}<|im_end|>end"
)


def chat_renderer(**settings: Any) -> tuple[Renderer, Any]:
    theirs = reranker_tokenizer()
    tokenizer = fast(theirs)
    tokenizer.chat = ModelChatTemplates(templates={"default": TEMPLATE})
    return make_renderer(tokenizer, pair_format=ChatPair(ChatFormat(structured=False, options={})), **settings), theirs


async def test_what_a_chat_template_ends_with_is_kept():
    renderer, theirs = chat_renderer()
    suffix = theirs.encode("<|im_end|>end")
    for second in ("b", words(5000)):
        ids = (await render(renderer, PairPrompt("a", second), truncate_to=50)).token_ids.tolist()
        whole = theirs.encode(f"<|im_start|>query: a<|im_start|>document: {second}<|im_end|>end")
        assert ids == (whole if len(whole) <= 50 else whole[: 50 - len(suffix)] + suffix)
    with pytest.raises(ContextLengthError, match="has more than"):
        await render(renderer, PairPrompt("a", words(5000)))
    assert (await render(renderer, PairPrompt("a", "b"), truncate_to=2)).token_ids.tolist() == suffix[-2:]


async def test_texts_are_cut_to_their_own_limits_before_a_template_holds_them():
    renderer, theirs = chat_renderer(max_model_len=200)
    pair = PairPrompt("größer yes no", words(3000), max_first_tokens=2, max_second_tokens=1)
    text = theirs.decode((await render(renderer, pair, instruction="say")).token_ids.tolist())
    assert text == "<|im_start|>system: say<|im_start|>query: gr<|im_start|>document: w<|im_end|>end"


async def test_what_a_template_refuses_is_the_clients_fault():
    with pytest.raises(InvalidRequestError, match="refuses an input: no such word, please"):
        await render(chat_renderer()[0], PairPrompt("forbidden", "b"))
