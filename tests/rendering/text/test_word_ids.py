"""The ids of a text that are put together from its words are the same as those of the library, for any text."""

import random
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from tokenizers import AddedToken, Encoding, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tests.rendering.text.test_tokenizer import CORPUS, TEXTS, byte_level_backend, unigram_backend, word_piece_backend
from trio_pool_serve.rendering.text import word_ids
from trio_pool_serve.rendering.text.fast_tokenizer import FastTokenizer
from trio_pool_serve.rendering.text.word_ids import MAX_CHARACTERS, WordIds, tokenizes_by_words

PIECES = [
    " ",
    "  ",
    "a",
    "Σς",
    "e\u0301",
    "\u0301",
    "\u3000",
    "\u00a0",
    "漢",
    "\t",
    "\x00",
    "[SEP]",
    "[MASK]",
    "don't",
    "##x",
]


def copy_of(backend: Backend) -> Backend:
    return Backend.from_str(backend.to_str())


def random_text(rng: random.Random) -> str:
    def character() -> str:
        return chr(rng.choice([rng.randrange(0x250), rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)]))

    return "".join(rng.choice([*PIECES, character(), "words "]) for _ in range(rng.randrange(40)))


@pytest.mark.parametrize("rules", [{}, {"lowercase": False}, {"strip_accents": False}, {"clean_text": False}], ids=str)
def test_the_ids_of_words_are_those_of_the_whole_text(rules):
    backend = copy_of(word_piece_backend())
    backend.normalizer = normalizers.BertNormalizer(**rules)
    tokenizer, rng = FastTokenizer(backend, frozenset()), random.Random(0)
    assert tokenizes_by_words(backend)
    texts = [*CORPUS, *TEXTS, *(random_text(rng) for _ in range(2000))]
    known = 0
    for text in texts:
        for adds in (True, False):
            ids = tokenizer.short_ids(text, add_special_tokens=adds)
            known += ids is not None
            if ids is not None:
                whole = tokenizer.finish(tokenizer.encode(text), 10_000, "right", add_special_tokens=adds)
                np.testing.assert_array_equal(ids, whole, strict=True)
    assert known > len(texts)


def test_other_tokenizers_have_no_ids_of_words():
    other_words, with_blank = copy_of(word_piece_backend()), copy_of(word_piece_backend())
    other_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with_blank.add_special_tokens([AddedToken("two words")])
    with_tab = copy_of(word_piece_backend())
    with_tab.add_tokens([AddedToken("two\twords", normalized=True)])
    for backend in (byte_level_backend(), unigram_backend(), other_words, with_blank, with_tab):
        assert not tokenizes_by_words(backend)
        assert FastTokenizer(copy_of(backend), frozenset()).short_ids("a", add_special_tokens=True) is None


def word_ids_of(encoded: list[str]) -> WordIds:
    backend = copy_of(word_piece_backend())
    backend.no_padding()

    def encode(texts: Sequence[str]) -> Sequence[Encoding]:
        encoded.extend(texts)
        return backend.encode_batch_fast(list(texts), add_special_tokens=False)

    return WordIds(encode)


def test_each_word_is_tokenised_once_and_long_ones_are_not_kept():
    encoded: list[str] = []
    words = word_ids_of(encoded)
    first = words.ids_of("one two one")
    assert words.ids_of("one two one") == first
    assert encoded == ["one", "two"]
    assert words.ids_of("three " + "x" * (MAX_CHARACTERS + 1)) is None
    assert encoded == ["one", "two"]


def test_words_are_forgotten_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(word_ids, "MAX_WORDS", 10)
    encoded: list[str] = []
    words = word_ids_of(encoded)
    expected = {number: words.ids_of(f"word {number}") for number in range(30)}
    assert len(words._known) <= 10
    assert {number: words.ids_of(f"word {number}") for number in range(30)} == expected


def test_a_word_may_become_known_while_it_is_looked_up():
    class Late(dict[str, list[int]]):
        def __missing__(self, word: str) -> list[int]:
            self[word] = [len(word)]  # by another thread
            raise KeyError(word)

    words = word_ids_of([])
    words._known = Late()
    assert words.ids_of("one") == [3]


def test_threads_share_the_words(monkeypatch):
    monkeypatch.setattr(word_ids, "MAX_WORDS", 50)
    words, wrong = word_ids_of([]), []
    expected = [words.ids_of(f"t {number}") for number in range(100)]

    def use(seed: int) -> None:
        rng = random.Random(seed)
        for number in rng.choices(range(100), k=2000):
            ids = words.ids_of(f"t {number}")
            wrong.extend([number] if ids != expected[number] else [])

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
