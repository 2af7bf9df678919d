"""The cut before tokenising: it must not show, and it must be worth its while."""

from typing import Any

import pytest
from attrs import define, field
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer, CanineTokenizer

from tests.lanes import sampled
from tests.rendering.text.test_tokenizer import FAST_KINDS, fast_tokenizer
from trio_pool_serve.prompts import TruncationSide
from trio_pool_serve.rendering.text.excerpt import (
    MARGIN_TOKENS,
    MAX_CHARACTERS_PER_TOKEN,
    SAMPLE_CHARACTERS,
    SHIFTS,
    Excerpt,
    encode_excerpt,
)
from trio_pool_serve.rendering.text.fast_tokenizer import FastTokenizer
from trio_pool_serve.rendering.text.slow_tokenizer import SlowTokenizer
from trio_pool_serve.rendering.text.tokenizer import Encoded

TOKENIZERS = {kind: fast_tokenizer(kind) for kind in FAST_KINDS}
each_kind = pytest.mark.parametrize("kind", FAST_KINDS)
each_side = pytest.mark.parametrize("side", ["right", "left"])
ALL_TOKENIZERS = {**TOKENIZERS, "byt5": SlowTokenizer(ByT5Tokenizer()), "canine": SlowTokenizer(CanineTokenizer())}
PROSE = "It was the best of times, it was the worst of times; the 1st of 2 cities — naïve or not. "
CHINESE = "漢字かな交じり文を書く。今日は天気がいいから散歩しましょう。東京都に住んでいます、元気ですか？"
MEGABYTES_10 = 10_000_000
LETTERS = st.text("abcdefghijklmnopqrstuvwxyzABCäöüßéñжяλ", min_size=1, max_size=12)
PIECES = st.one_of(
    LETTERS,
    LETTERS.map(lambda word: word + " "),
    st.text("漢字かな交じり文。東京都安녕하세요", min_size=1, max_size=10),
    st.text("😀👩‍👧🇩🇪é̂", min_size=1, max_size=4),
    st.text(" \t\n\u3000\u00a0", min_size=1, max_size=4),
    st.text("0123456789.,-=_'/", min_size=1, max_size=6),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
)
RUNS = st.tuples(PIECES, st.sampled_from([1, 1, 1, 2, 30, 400])).map(lambda run: run[0] * run[1])
LONG_WORDS = st.randoms(use_true_random=False).map(
    lambda random: "".join(random.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=random.randrange(50, 3000)))
)
TEXTS = st.lists(st.one_of(RUNS, RUNS, st.just(PROSE), st.just(CHINESE), LONG_WORDS), max_size=30).map("".join)


def whole(tokenizer: FastTokenizer, text: str, keep: int, side: TruncationSide) -> list[int]:
    return tokenizer.finish(tokenizer.encode(text), keep, side, add_special_tokens=True).tolist()


def finished(tokenizer: FastTokenizer, excerpt: Excerpt, keep: int, side: TruncationSide) -> list[int]:
    return tokenizer.finish(excerpt.encoded, keep, side, add_special_tokens=True).tolist()


def of_excerpt(tokenizer: FastTokenizer, text: str, keep: int, side: TruncationSide) -> list[int]:
    return finished(tokenizer, encode_excerpt(tokenizer, text, keep, side), keep, side)


@each_side
@each_kind
@settings(max_examples=5)
@given(text=TEXTS, keep=st.integers(1, 40))
@example(text="a" * 4001 + "b", keep=3)
@example(text="ab" * 2001, keep=5)
@example(text="zqxj" * 25 + " words" * 2000, keep=50)
@example(text="words " * 170 + "zqxj" * 500, keep=150)
@example(text="zqxj" * 500 + " words" * 170, keep=150)
@example(text="zqxjvkwyp0123456789" * 3000 + " the end" * 3000, keep=3)
@example(text="\u3000 " * 2000 + "end", keep=2)
@example(text="12345678901" * 400, keep=7)
def test_the_cut_does_not_show(kind, side, text, keep):
    assert of_excerpt(TOKENIZERS[kind], text, keep, side) == whole(TOKENIZERS[kind], text, keep, side)


@pytest.mark.slow
@each_side
@each_kind
@settings(max_examples=200)
@given(text=TEXTS, keep=st.integers(1, 40))
def test_the_cut_does_not_show_in_many_texts(kind, side, text, keep):
    assert of_excerpt(TOKENIZERS[kind], text, keep, side) == whole(TOKENIZERS[kind], text, keep, side)


REPEATED = {
    "a letter": "a", "two letters": "ab", "three letters": "abc", "a blank": " ", "a line break": "\n",
    "blanks of two kinds": "\u00a0 ", "a full stop": ".", "dashes": "-=", "a digit": "1", "the digits": "1234567890",
    "two Chinese characters": "漢字", "an emoji": "😀", "a joined emoji": "👩\u200d👧",
    "combining characters": "\u0301\u0323", "a letter with combining characters": "e\u0301\u0323",
    "a Korean syllable": "각", "a Thai syllable": "กำ", "a long word": "x" * 300 + " ",
}  # fmt: skip


@pytest.mark.parametrize("kind", ALL_TOKENIZERS)
@sampled("repeated", REPEATED, keep=["two letters", "a full stop", "two Chinese characters", "an emoji"])
def test_the_cut_does_not_show_in_40_000_characters_of_one_thing(kind, repeated):
    tokenizer, run = ALL_TOKENIZERS[kind], REPEATED[repeated] * (39_999 // len(REPEATED[repeated]))
    for text in (f"first {run} last", PROSE * 30 + run + PROSE * 30, run[:20_001] + PROSE + run[:20_002]):
        encoded = tokenizer.encode(text)
        ids = tokenizer.finish(encoded, len(encoded), "right", add_special_tokens=False).tolist()
        for keep in (7, 254):
            for side in ("right", "left"):
                excerpt = encode_excerpt(tokenizer, text, keep, side)
                kept = tokenizer.finish(excerpt.encoded, keep, side, add_special_tokens=False)
                assert kept.tolist() == (ids[:keep] if side == "right" else ids[-keep:]), (keep, side)


@define(eq=False)
class CountingTokenizer:
    """Counts the characters that are handed to the tokenizer inside."""

    inner: FastTokenizer
    characters: int = field(default=0, init=False)

    def encode(self, text: str, *, positions: bool = False) -> Encoded:
        self.characters += len(text)
        return self.inner.encode(text, positions=positions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("sample", [PROSE, CHINESE, "word ", "def f(x):\n    return x\n\n"])
@each_side
@each_kind
def test_of_10_megabytes_only_what_is_kept_is_tokenised(kind, side, sample):
    text, keep = sample * (MEGABYTES_10 // len(sample)), 510
    tokenizer = CountingTokenizer(TOKENIZERS[kind])
    excerpt = encode_excerpt(tokenizer, text, keep, side)
    assert not excerpt.is_whole
    assert tokenizer.characters <= 5 * (keep + MARGIN_TOKENS) * 8
    enough = text[:50_000] if side == "right" else text[-50_000:]
    assert finished(tokenizer, excerpt, keep, side) == whole(tokenizer.inner, enough, keep, side)


@pytest.mark.parametrize("sample", [PROSE, CHINESE, "word ", "1 2 3 4 "])
@each_side
@each_kind
def test_of_a_long_text_hardly_more_tokens_are_made_than_kept(kind, side, sample):
    text, keep = sample * (500_000 // len(sample)), 10_000
    tokenizer = CountingTokenizer(TOKENIZERS[kind])
    excerpt = encode_excerpt(tokenizer, text, keep, side)
    assert keep + MARGIN_TOKENS <= excerpt.tokens <= 1.4 * keep
    enough = text[:150_000] if side == "right" else text[-150_000:]
    assert finished(tokenizer, excerpt, keep, side) == whole(tokenizer.inner, enough, keep, side)


def test_a_sample_that_is_unlike_the_rest_does_not_show():
    tokenizer, keep = TOKENIZERS["word-piece"], 20_000
    for text in ("1 2 3 4 " * 1000 + "information " * 50_000, "information " * 1000 + "1 2 3 4 " * 50_000):
        for side in ("right", "left"):
            assert of_excerpt(tokenizer, text, keep, side) == whole(tokenizer, text, keep, side)


@pytest.mark.parametrize(("kind", "side"), [("word-piece", "right"), ("unigram", "left")])
def test_100_kilobytes_of_blanks_have_the_tokens_around_them(kind, side):
    text = "first" + " " * 100_000 + "last"
    tokenizer = CountingTokenizer(TOKENIZERS[kind])
    excerpt = encode_excerpt(tokenizer, text, 30, side)
    assert excerpt.is_whole
    assert tokenizer.characters <= len(text) + 4 * SAMPLE_CHARACTERS, "what cannot be enough is not tried"
    assert finished(tokenizer, excerpt, 30, side) == whole(tokenizer.inner, "first last", 30, side)


@each_side
@pytest.mark.parametrize("filler", ["a", " ", "\n", "😀", "ab"])
@each_kind
def test_of_10_megabytes_of_one_thing_a_bounded_part_is_tokenised(kind, filler, side):
    tokenizer = CountingTokenizer(TOKENIZERS[kind])
    excerpt = encode_excerpt(tokenizer, f"first {filler * (MEGABYTES_10 // len(filler))} last", 30, side)
    assert not excerpt.is_whole
    sampled_characters = 4 * (1 + len(SHIFTS)) * SAMPLE_CHARACTERS
    assert tokenizer.characters <= (30 + MARGIN_TOKENS) * MAX_CHARACTERS_PER_TOKEN * 4 / 3 + sampled_characters
    alike = tokenizer.inner.encode(f"first {filler * 300} last")
    kept, expected = (tokenizer.finish(each, 1, side, add_special_tokens=False) for each in (excerpt.encoded, alike))
    assert kept.tolist() == expected.tolist()


@each_kind
def test_for_many_tokens_no_more_of_one_thing_is_tokenised(kind):
    tokenizer = CountingTokenizer(TOKENIZERS[kind])
    encode_excerpt(tokenizer, "ab" * (MEGABYTES_10 // 2), 10_000, "right")
    assert tokenizer.characters <= 2**18 * 4 / 3


@each_side
@pytest.mark.parametrize("filler", [".", "漢字", "-=", "1234567890"])
@each_kind
def test_of_10_megabytes_of_what_the_cut_changes_nothing_in_some_kilobytes_are_tokenised(kind, filler, side):
    tokenizer = CountingTokenizer(TOKENIZERS[kind])
    excerpt = encode_excerpt(tokenizer, filler * (MEGABYTES_10 // len(filler)), 254, side)
    if (kind, filler) == ("word-piece", "1234567890"):  # one unknown word
        assert excerpt.tokens == 1
    else:
        assert tokenizer.characters <= (1 + len(SHIFTS)) * SAMPLE_CHARACTERS + 8 * (254 + MARGIN_TOKENS)


def test_what_a_cut_leaves_of_an_unknown_word_is_not_kept():
    tokenizer = TOKENIZERS["word-piece"]
    unknown = "zqxjvkwyp0123456789" * 10
    for known in range(20, 320, 3):  # the cut goes through the unknown word for some of them
        text = "information " * known + unknown + " and on" * 3000
        assert of_excerpt(tokenizer, text, known + 20, "right") == whole(tokenizer, text, known + 20, "right")


@each_kind
def test_a_short_text_is_tokenised_once_and_whole(kind):
    tokenizer = CountingTokenizer(TOKENIZERS[kind])
    excerpt = encode_excerpt(tokenizer, PROSE, 3, "right")
    assert excerpt.is_whole
    assert excerpt.tokens == len(tokenizer.inner.encode(PROSE)) > 3
    assert tokenizer.characters == len(PROSE)
