"""Which tokens belong to a chunk, with tokenizers of every kind."""

from itertools import pairwise

import numpy as np
import pytest
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from tests.rendering.text.test_tokenizer import FAST_KINDS, TEXTS, fast_tokenizer
from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.prompts import ChunkedPrompt, RenderingParams, TextPrompt
from trio_pool_serve.rendering.text.chunk_tokens import tokens_of_chunks
from trio_pool_serve.rendering.text.slow_tokenizer import SlowTokenizer
from trio_pool_serve.rendering.text.text_renderer import TextRenderer
from trio_pool_serve.rendering.text.tokenizer import TokenizerPool
from trio_pool_serve.types import RenderedPrompt

each_kind = pytest.mark.parametrize("kind", FAST_KINDS)

RENDERERS = {
    kind: TextRenderer(TokenizerPool(fast_tokenizer(kind), 1), max_model_len=4096, vocab_size=100_000)
    for kind in FAST_KINDS
}

LEAVES_INSTRUCTION_OUT = {
    kind: evolve(
        RENDERERS[kind],
        tokenizers=TokenizerPool(evolve(fast_tokenizer(kind), special_ids=frozenset(special_ids)), 1),
        pools_instruction=False,
    )
    for kind, special_ids in {"word-piece": {101, 102}, "byte-level": {0}, "unigram": {0, 1, 2, 3}}.items()
}
INSTRUCTION = "Represent the sentence for retrieval please: "
WORDS = st.text(alphabet="ab 🙂é\u0301漢👩\u200d字.\n", min_size=1, max_size=12)
NO_LETTERS = dict.fromkeys(map(ord, "▁ĠĊ# "))
"""What vocabularies have in front of words, and of their later pieces."""


def render(kind: str, text: str, *chunks: tuple[int, int], **params) -> RenderedPrompt:
    return RENDERERS[kind].render(ChunkedPrompt(text, chunks), RenderingParams(**params))


def covered(kind: str, text: str, *chunks: tuple[int, int], **params) -> list[str]:
    """Return the letters of the tokens of each chunk."""
    rendered = render(kind, text, *chunks, **params)
    with RENDERERS[kind].tokenizers.lend() as tokenizer:
        pieces = [tokenizer.decode([token], skip_special_tokens=True) for token in rendered.token_ids.tolist()]
    return ["".join(pieces[begin:end]).translate(NO_LETTERS) for begin, end in rendered.chunks.tolist()]


@each_kind
def test_a_blank_in_front_of_a_word_is_of_its_chunk_on_whichever_side_it_is(kind):
    for text, cut in (("one two", 3), ("one two", 4), ("one  two", 4), ("one \ntwo", 4)):
        assert covered(kind, text, (0, cut), (cut, len(text))) == ["one", "two"], (text, cut)


@pytest.mark.parametrize("side", ["right", "left"])
@each_kind
def test_what_is_left_of_a_truncated_document_has_its_chunks(kind, side):
    text, params = "word " * 3000 + "end", {"truncate_to": 40, "truncation_side": side}
    begin, end = (0, 5), (len(text) - 3, len(text))
    kept, cut_off, word = (end, begin, "end") if side == "left" else (begin, end, "word")
    assert len(render(kind, text, kept, **params).token_ids) == 40
    assert covered(kind, text, kept, **params) == [word]
    with pytest.raises(InvalidRequestError, match=r"Chunk 1, .* has no tokens"):
        render(kind, text, kept, cut_off, **params)


def pooled_without_instruction(kind: str, prompt: ChunkedPrompt | TextPrompt, **params) -> RenderedPrompt:
    return LEAVES_INSTRUCTION_OUT[kind].render(prompt, RenderingParams(instruction=INSTRUCTION, **params))


@pytest.mark.parametrize("words", [10, 3000])
@each_kind
def test_an_instruction_that_is_cut_off_is_not_left_out_of_the_first_chunk(kind, words):
    text = "the " * words + "end"
    cut = text.index("end")
    prompt = ChunkedPrompt(text, ((0, cut), (cut, len(text))))
    for keep in (8, 10):
        rendered = pooled_without_instruction(kind, prompt, truncate_to=keep, truncation_side="left")
        assert rendered.instruction_tokens == 0, keep
        (begin, middle), (same, end) = rendered.chunks.tolist()
        assert (begin, same, end) == (0, middle, keep)
        assert begin < middle < end


@each_kind
def test_what_is_left_of_an_instruction_is_left_out_of_the_first_chunk(kind):
    prompt = ChunkedPrompt("one two three four", ((0, 8), (8, 18)))
    whole = pooled_without_instruction(kind, prompt)
    tokens, counted = len(whole.token_ids), whole.instruction_tokens
    for cut in range(1, 4):
        rendered = pooled_without_instruction(kind, prompt, truncate_to=tokens - cut, truncation_side="left")
        with LEAVES_INSTRUCTION_OUT[kind].tokenizers.lend() as tokenizer:
            of_document = rendered.token_ids[rendered.chunks[0, 0] :].tolist()
            document = tokenizer.decode(of_document, skip_special_tokens=True)
        assert document.translate(NO_LETTERS) == "onetwothreefour", cut
        assert rendered.instruction_tokens in (counted - cut, counted - cut - 1)  # alone it has a blank at its end
        assert rendered.chunks[1].tolist() == [edge - cut for edge in whole.chunks[1].tolist()]


@pytest.mark.parametrize("side", ["right", "left"])
@each_kind
def test_a_chunk_that_is_the_whole_document_has_what_is_pooled_of_the_text(kind, side):
    text = "one two three four five six"
    for keep in (None, 24, 16, 8):
        params = {"truncate_to": keep, "truncation_side": side}
        skipped = pooled_without_instruction(kind, TextPrompt(text), **params).instruction_tokens
        try:
            rendered = pooled_without_instruction(kind, ChunkedPrompt(text, ((0, len(text)),)), **params)
        except InvalidRequestError as error:
            assert side == "right"
            assert "has no tokens" in str(error)  # noqa: PT017  (the instruction is all that is left)
            continue
        tokens = len(rendered.token_ids)
        assert rendered.chunks.tolist() == [[skipped if skipped < tokens else 0, tokens]], keep


@each_kind
def test_no_more_tokens_of_an_instruction_are_counted_than_a_row_has(kind):
    for side in ("right", "left"):
        rendered = pooled_without_instruction(kind, TextPrompt("dog"), truncate_to=4, truncation_side=side)
        assert 0 < rendered.instruction_tokens <= len(rendered.token_ids) == 4


@pytest.mark.parametrize("kind", ["byte-level", "unigram"])
def test_a_first_chunk_of_one_token_keeps_it_where_the_instruction_has_one_more_alone(kind):
    """The blank at the instruction's end is a token of its own alone, and of the next word's in front of a text."""
    rendered = pooled_without_instruction(kind, ChunkedPrompt("dog the", ((0, 4), (4, 7))))
    (begin, middle), (same, end) = rendered.chunks.tolist()
    assert rendered.instruction_tokens == middle
    assert (begin, same) == (middle - 1, middle)
    assert end == len(rendered.token_ids)


def test_chunks_without_tokens_are_refused_whatever_they_were_made_of():
    positions = np.array([[-1, -1], [0, 3], [4, 7], [-1, -1]], dtype=np.int64)
    for chunk in ((3, 3), (7, 0)):
        with pytest.raises(InvalidRequestError, match=r"Chunk 1, .* has no tokens"):
            tokens_of_chunks([(0, 3), chunk], "one two", positions, begin=0, first_pooled=0)


@given(text=st.sampled_from(TEXTS) | WORDS, kind=st.sampled_from(FAST_KINDS), data=st.data())
def test_chunks_that_divide_a_text_divide_its_tokens(text, kind, data):
    assume(len(text) > 1)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=4)))
    try:
        rendered = render(kind, text, *pairwise([0, *cuts, len(text)]))
    except InvalidRequestError as error:
        assert "has no tokens" in str(error)  # noqa: PT017  (some cuts leave a chunk without any)
        return
    edges = rendered.chunks.tolist()
    assert [begin for begin, _ in edges] == [0, *(end for _, end in edges[:-1])]
    assert edges[-1][1] == len(rendered.token_ids)
    assert all(begin < end for begin, end in edges)


def test_special_tokens_that_the_text_has_are_its_own():
    text = "one [SEP] two"
    assert render("word-piece", text, (0, 4), (4, 9), (9, 13)).chunks.tolist() == [[0, 2], [2, 3], [3, 5]]


def test_tokenizers_without_positions_refuse():
    renderer = TextRenderer(TokenizerPool(SlowTokenizer(ByT5Tokenizer()), 1), max_model_len=64, vocab_size=1000)
    with pytest.raises(InvalidRequestError, match="this model's tokenizer does not return"):
        renderer.render(ChunkedPrompt("one", ((0, 3),)), RenderingParams())
