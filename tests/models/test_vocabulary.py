"""Tokenizers of SentencePiece files, of Japanese, and tokenizers that do not fit the model's token embeddings."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import transformers
from tokenizers import processors

from tests.model_folders import write_json
from tests.models.model_families import CORPUS, TEXTS, bert_tokenizer, edit_json, qwen3_tokenizer, write_model
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.prompts import RenderingParams, TextPrompt
from trio_pool_serve.rendering.text.slow_tokenizer import SlowTokenizer
from trio_pool_serve.rendering.text.text_renderer import TextRenderer
from trio_pool_serve.rendering.text.tokenizer import Tokenizer, TokenizerPool
from trio_pool_serve.storage.model_cache import ModelCache

BERT_IDS = {"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3}
BERT_PIECES = {"pad_piece": "[PAD]", "unk_piece": "[UNK]", "bos_piece": "[CLS]", "eos_piece": "[SEP]"}
OF_LLAMA = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
}
ALONE: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "deberta": ("spm.model", "DebertaV2Config", "DebertaV2Tokenizer", BERT_IDS | BERT_PIECES),
    "xlm-roberta": ("sentencepiece.bpe.model", "XLMRobertaConfig", "XLMRobertaTokenizer", {}),
    "camembert": ("sentencepiece.bpe.model", "CamembertConfig", "CamembertTokenizer", {}),
    "t5": ("spiece.model", "T5Config", "T5Tokenizer", {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}),
    "albert": ("spiece.model", "AlbertConfig", "AlbertTokenizer", BERT_IDS | BERT_PIECES),
    "mistral": ("tokenizer.model", "MistralConfig", "LlamaTokenizer", OF_LLAMA),
    "llama": ("tokenizer.model", "LlamaConfig", "LlamaTokenizer", OF_LLAMA),
}
"""The file, the classes of the config and the tokenizer, and how SentencePiece is trained."""

ODD = ["", "two  blanks", "a line\nand another", " 😀 é ﬁ 中文", "the </s> and <s> and [MASK] end"]


def write_sentencepiece(folder: Path, kind: str) -> Path:
    """Write a folder whose tokenizer is a SentencePiece file alone, as many are published."""
    file, config, tokenizer_class, options = ALONE[kind]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=400,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    folder.mkdir()
    (folder / file).write_bytes(model.getvalue())
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": tokenizer_class, "model_max_length": 64})
    getattr(transformers, config)(vocab_size=600).save_pretrained(folder)
    return folder


def ids(tokenizer: Tokenizer, text: str, *, special: bool = True) -> list[int]:
    return tokenizer.finish(tokenizer.encode(text), 10**6, "right", add_special_tokens=special).tolist()


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "cache")


@pytest.mark.parametrize("kind", ALONE)
def test_a_sentencepiece_file_alone_gives_transformers_ids_also_from_the_cache(tmp_path, cache, kind):
    path = write_sentencepiece(tmp_path / kind, kind)
    oracle = transformers.AutoTokenizer.from_pretrained(path)
    for _ in range(2):
        tokenizer = load_tokenizer(read_model_folder(path), cache=cache)
        for text in [*TEXTS, *ODD]:
            assert ids(tokenizer, text) == oracle(text)["input_ids"], text
    assert len(cache.entries()) == 1


def test_mistral_s_tokens_are_sentencepiece_s_own(tmp_path):
    path = write_sentencepiece(tmp_path / "mistral", "mistral")
    tokenizer = load_tokenizer(read_model_folder(path), cache=None)
    own = sentencepiece.SentencePieceProcessor(model_file=str(path / "tokenizer.model"))
    for text in [*TEXTS, *ODD[1:-1], " ", "   three blanks", "trailing ", "tab\t0123 45"]:
        assert ids(tokenizer, text, special=False) == own.encode(text), text


# -- Japanese ---------------------------------------------------------------------------------------------

JAPANESE = ["東京で寿司を食べました。", "世界、hello 東京", ""]


def write_japanese(folder: Path, dictionary: str) -> Path:
    tokens = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "東京",
        "で",
        "寿司",
        "を",
        "食べ",
        "まし",
        "た",
        "。",
        "世界",
        "、",
        "##ll",
        "he",
        "##o",
    ]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    settings = {"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "mecab", "model_max_length": 64}
    mecab = {"subword_tokenizer_type": "wordpiece", "mecab_kwargs": {"mecab_dic": dictionary}}
    write_json(folder / "tokenizer_config.json", settings | mecab)
    transformers.BertConfig(vocab_size=len(tokens)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dictionary", ["unidic_lite", "ipadic"])
def test_japanese_bert_s_words_are_those_of_its_dictionary_in_each_copy(tmp_path, dictionary):
    path = write_japanese(tmp_path / "model", dictionary)
    oracle = transformers.AutoTokenizer.from_pretrained(path)
    pool = TokenizerPool(load_tokenizer(read_model_folder(path), cache=None), 2)
    assert isinstance(pool.first, SlowTokenizer)
    renderer = TextRenderer(pool, max_model_len=64, vocab_size=18)
    for text in JAPANESE * 2:
        rendered = renderer.render(TextPrompt(text), RenderingParams())
        assert rendered.token_ids.tolist() == oracle(text)["input_ids"]
    assert ids(pool.first, JAPANESE[0]) == [2, 5, 6, 7, 8, 9, 10, 11, 12, 3]


@pytest.mark.parametrize("package", ["fugashi", "unidic_lite"])
def test_without_its_packages_japanese_bert_names_the_extra(tmp_path, monkeypatch, package):
    path = write_japanese(tmp_path / "model", "unidic_lite")
    monkeypatch.setitem(sys.modules, package, None)  # importing it is a ModuleNotFoundError
    with pytest.raises(ModelLoadError, match=r"pip install 'trio-pool-serve\[japanese\]'"):
        load_tokenizer(read_model_folder(path), cache=None)


# -- folders without a tokenizer ----------------------------------------------------------------------------


def test_a_model_that_was_saved_without_its_tokenizer_is_refused(tmp_path):
    path = write_model(tmp_path / "model", "BertModel", bert_tokenizer())
    for file in path.glob("*token*"):
        file.unlink()
    with pytest.raises(ModelLoadError, match=r"contains no vocab\.txt: without a vocabulary, all texts would get the"):
        load_tokenizer(read_model_folder(path), cache=None)


@pytest.mark.parametrize(
    ("half", "said"),
    [("vocab.json", "`vocab` and `merges` must be both"), ("merges.txt", r"contains no tokenizer\.json")],
)
def test_half_of_a_tokenizer_is_refused(tmp_path, half, said):
    path = write_model(tmp_path / "model", "Qwen3Model", qwen3_tokenizer())
    content = json.loads((path / "tokenizer.json").read_text())["model"]
    halves = {"vocab.json": json.dumps(content["vocab"]), "merges.txt": "\n".join(map(" ".join, content["merges"]))}
    (path / half).write_text(halves[half])
    (path / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=said):
        load_tokenizer(read_model_folder(path), cache=None)


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("ByT5Tokenizer", transformers.T5Config(vocab_size=384), [100, 101, 1]),
        ("CanineTokenizer", transformers.CanineConfig(), [0xE000, ord("a"), ord("b"), 0xE001]),
    ],
)
def test_a_class_that_reads_no_file_needs_none(tmp_path, name, config, expected):
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": name, "model_max_length": 64})
    config.save_pretrained(tmp_path)
    folder = read_model_folder(tmp_path)
    assert ids(load_tokenizer(folder, cache=None), "ab") == expected
    assert folder.vocab_size > max(expected)


# -- vocabularies and tables ----------------------------------------------------------------------------------


def with_rows(count: Callable[[int], int]) -> Callable[[Path], object]:
    """Return an edit that gives the config another number of rows, by the number of tokens."""
    return lambda path: edit_json(
        path / "config.json", lambda config: config.update(vocab_size=count(len(bert_tokenizer())))
    )


def move_last_token(path: Path) -> None:
    def edit(document: Any) -> None:
        vocabulary = document["model"]["vocab"]
        vocabulary[max(vocabulary, key=vocabulary.get)] = 2**32 - 1

    edit_json(path / "tokenizer.json", edit)


REFUSED = {
    "one row too few": (with_rows(lambda size: size - 1), r"has ids up to \d+, but the model has \d+ token embeddings"),
    "an id of 32 bits": (move_last_token, rf"has ids up to {2**32 - 1}, but the model has"),
    "a tenth": (with_rows(lambda size: 10 * size + 1), r"has \d+ tokens, but the model has \d+ token embeddings\. Use"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_vocabulary_of_another_model_is_refused_with_both_numbers(tmp_path, cache, case):
    edit, said = REFUSED[case]
    path = write_model(tmp_path / "model", "BertModel", bert_tokenizer())
    edit(path)
    with pytest.raises(ModelLoadError, match=said):
        load_tokenizer(read_model_folder(path), cache=cache)
    assert cache.entries() == []


def test_a_tokenizer_in_python_with_more_ids_than_rows_is_refused(tmp_path):
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "ByT5Tokenizer", "model_max_length": 64})
    transformers.T5Config(vocab_size=259).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="has ids up to 383, but the model has 259 token embeddings"):
        load_tokenizer(read_model_folder(tmp_path), cache=None)


@pytest.mark.parametrize(("times", "warned"), [(1, False), (2, False), (3, True)])
def test_a_vocabulary_of_less_than_half_of_the_table_is_warned_of(tmp_path, caplog, times, warned):
    path = write_model(tmp_path / "model", "BertModel", bert_tokenizer())
    with_rows(lambda size: times * size)(path)
    load_tokenizer(read_model_folder(path), cache=None)
    assert ("Is it the tokenizer with which the model was trained?" in caplog.text) == warned


def add_token(path: Path, token: str, *, in_model: bool) -> int:
    """Add a special token to tokenizer.json alone, as EmbeddingGemma has one for images; return its id."""
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.add_special_tokens([token])
    backend.save(str(path / "tokenizer.json"))
    index = backend.token_to_id(token)
    if in_model:
        edit_json(path / "tokenizer.json", lambda document: document["model"]["vocab"].update({token: index}))
    return index


@pytest.mark.parametrize("in_model", [False, True])
def test_an_added_token_without_a_row_is_ordinary_text(tmp_path, cache, caplog, in_model):
    path = write_model(tmp_path / "model", "BertModel", bert_tokenizer())
    text = "the <image> of a fox"
    before = ids(load_tokenizer(read_model_folder(path), cache=None), text)
    index = add_token(path, "<image>", in_model=in_model)
    assert index in transformers.AutoTokenizer.from_pretrained(path)(text)["input_ids"]
    for _ in range(2):
        assert ids(load_tokenizer(read_model_folder(path), cache=cache), text) == before
    assert f"the model has {index} token embeddings, none for <image> of its tokenizer" in caplog.text
    assert len(cache.entries()) == 1


def test_a_token_without_a_row_that_is_added_to_every_text_is_refused(tmp_path):
    path = write_model(tmp_path / "model", "BertModel", bert_tokenizer())
    index = add_token(path, "<first>", in_model=False)
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single="<first> $A", special_tokens=[("<first>", index)])
    backend.save(str(path / "tokenizer.json"))
    edit_json(path / "tokenizer_config.json", lambda config: config.update(tokenizer_class="PreTrainedTokenizerFast"))
    with pytest.raises(ModelLoadError, match=rf"has ids up to {index}, but .* so '<first>' cannot be computed"):
        load_tokenizer(read_model_folder(path), cache=None)
