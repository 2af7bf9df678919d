"""What an input type does to a text: its length, what is added, which tokens count."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from tests.model_folders import VOCABULARY, write_late_interaction_folder, write_lookup_folder
from trio_pool_serve.errors import InvalidRequestError, ModelLoadError
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.renderer_loading import renderer_of
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.prompts import RenderingParams, TextPrompt, TokensPrompt
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import RenderedPrompt

pytestmark = pytest.mark.unit
CLS, SEP, MASK, COLON = (VOCABULARY[token] for token in ("[CLS]", "[SEP]", "[MASK]", ":"))
MOST = 64
ColBERT = Callable[..., Renderer]


@pytest.fixture
def colbert(tmp_path: Path) -> ColBERT:
    """Makes the renderer of a late-interaction model with settings of the transformer and of the mask."""

    def make(mask: object = None, **settings: object) -> Renderer:
        return renderer_for(write_late_interaction_folder(tmp_path / "model", mask, max_length=MOST, **settings))

    return make


def renderer_for(path: Path) -> Renderer:
    folder = read_model_folder(path)
    return renderer_of(folder, load_tokenizer(folder), Offload(), workers=1)


def ids_of(text: str) -> list[int]:
    return [VOCABULARY[word] for word in text.split()]


async def render(renderer: Renderer, text: str, input_type: str | None, **params) -> RenderedPrompt:
    return await renderer.render(TextPrompt(text), RenderingParams(input_type=input_type, **params))


FIXED = {"strategy": "fixed", "length": 6}
LONG = "w1 w2 w3 w4 w5"
FILLED = "[CLS] w1 w2 [SEP] [MASK] [MASK]"


@pytest.mark.parametrize(
    ("expansion", "text", "input_type", "params", "expected", "attended"),
    [
        ({}, "w1 w2", "query", {}, FILLED, 4),
        ({"attend": True}, "w1 w2", "query", {}, FILLED, None),
        ({"token": "w9"}, "w1 w2", "query", {}, "[CLS] w1 w2 [SEP] w9 w9", 4),
        ({}, "w1", "document", {}, "[CLS] w1 [SEP]", None),
        ({}, "w1", None, {}, "[CLS] w1 [SEP]", None),
        # A side's own length is part of how the model reads it, whatever the other side's is.
        *(({}, LONG, "query", {"truncate_to": asked}, "[CLS] w1 w2 w3 w4 [SEP]", None) for asked in (None, 6, MOST)),
        ({}, LONG, "query", {"truncate_to": 4}, FILLED, 4),
    ],
)
async def test_queries_are_filled_up_or_cut_to_their_length(
    colbert: ColBERT, expansion: dict, text: str, input_type: str, params: dict, expected: str, attended: int | None
):
    """What is added counts, but is attended to only if the model says so."""
    prompt = await render(colbert(query_expansion=FIXED | expansion), text, input_type, **params)
    assert prompt.token_ids.tolist() == ids_of(expected)
    assert prompt.attended == attended
    assert prompt.kept is None


def test_a_token_that_is_not_there_is_refused(colbert: ColBERT):
    with pytest.raises(ModelLoadError, match="lacks the query expansion token"):
        colbert(query_expansion=FIXED | {"token": "nowhere"})


async def test_a_query_that_is_filled_up_to_a_least_length_may_be_longer(colbert: ColBERT):
    renderer = colbert(query_expansion=FIXED | {"strategy": "min"}, query_length=9)
    assert len((await render(renderer, LONG, "query")).token_ids) == 7
    assert len((await render(renderer, f"{LONG} w6 w7 w8", "query")).token_ids) == 9


async def test_a_document_has_a_length_of_its_own(colbert: ColBERT):
    renderer = colbert(document_length=5)
    for asked in (None, MOST):
        assert len((await render(renderer, "w1 w2 w3 w4", "document", truncate_to=asked)).token_ids) == 5
    assert len((await render(renderer, "w1 w2 w3 w4", None)).token_ids) == 6


@pytest.mark.parametrize(
    ("mask", "text", "kept", "applies", "others"),
    [
        ({"skiplist_words": [":", "no token"]}, "w1 : w2 :", [1, 1, 0, 1, 0, 1], ("document", None), "query"),
        ({"skiplist_words": [":"], "skiplist_tasks": "query"}, ": w1", [1, 0, 1, 1], ("query",), "document"),
    ],
)
async def test_words_of_the_skiplist_do_not_count_where_the_model_says_so(
    colbert: ColBERT, mask: dict, text: str, kept: list[int], applies: tuple, others: str
):
    renderer = colbert(mask)
    for input_type in applies:
        assert (await render(renderer, text, input_type)).kept.tolist() == kept
    assert (await render(renderer, text, others)).kept is None


async def test_token_ids_of_a_client_are_treated_as_a_texts(colbert: ColBERT):
    renderer = colbert({"skiplist_words": [":"]}, query_expansion=FIXED, document_length=5)

    async def tokens(ids: Iterable[int], input_type: str, **params) -> RenderedPrompt:
        prompt = TokensPrompt(np.array([*ids], dtype=np.int64))
        return await renderer.render(prompt, RenderingParams(input_type=input_type, **params))

    query = await tokens([CLS, 9, SEP], "query")
    assert (query.token_ids.tolist(), query.attended) == ([CLS, 9, SEP, MASK, MASK, MASK], 3)
    assert (await tokens([CLS, COLON, SEP], "document")).kept.tolist() == [True, False, True]
    assert len((await tokens([9] * 6, "document")).token_ids) == 5
    for side, expected in (("right", range(9, 14)), ("left", range(12, 17))):
        cut = await tokens(range(9, 17), "document", truncate_to=MOST, truncation_side=side)
        assert cut.token_ids.tolist() == [*expected]


@pytest.fixture
def lookup(tmp_path: Path) -> Renderer:
    """The renderer of an inference-free SPLADE."""
    return renderer_for(write_lookup_folder(tmp_path / "model", max_length=MOST, table_length=4))


async def test_a_text_whose_weights_are_looked_up_has_no_special_tokens_and_the_length_of_the_table(lookup: Renderer):
    assert (await render(lookup, "w1 w2", "query")).token_ids.tolist() == ids_of("w1 w2")
    for input_type in ("document", None):
        assert (await render(lookup, "w1 w2", input_type)).token_ids.tolist() == ids_of("[CLS] w1 w2 [SEP]")
    for text in ("w1 w2 w3 w4", LONG):
        assert len((await render(lookup, text, "query")).token_ids) == 4


async def test_a_text_whose_weights_are_looked_up_may_be_empty(lookup: Renderer):
    prompt = await render(lookup, "", "query")
    assert (len(prompt.token_ids), prompt.attended) == (1, 0)
    with pytest.raises(InvalidRequestError, match="no tokens"):
        await render(lookup, "", "document", add_special_tokens=False)
