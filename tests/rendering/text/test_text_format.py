"""What an input type does to a text: its length, what is added, which tokens count."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from tests.model_folders import VOCABULARY, ids_of, write_late_interaction_folder, write_lookup_folder
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


async def render(renderer: Renderer, text: str, input_type: str | None, **params) -> RenderedPrompt:
    return await renderer.render(TextPrompt(text), RenderingParams(input_type=input_type, **params))


FIXED = {"strategy": "fixed", "length": 6}
LONG = "w1 w2 w3 w4 w5"


@pytest.mark.parametrize(
    ("asked", "expected", "attended"),
    [
        *((asked, "[CLS] w1 w2 w3 w4 [SEP]", None) for asked in (None, 6, MOST)),
        (4, "[CLS] w1 w2 [SEP] [MASK] [MASK]", 4),
    ],
)
async def test_queries_are_cut_to_what_is_asked_and_filled_up_to_their_length(
    colbert: ColBERT, asked: int | None, expected: str, attended: int | None
):
    """A side's own length is part of how the model reads it, whatever the other side's is."""
    prompt = await render(colbert(query_expansion=FIXED), LONG, "query", truncate_to=asked)
    assert prompt.token_ids.tolist() == ids_of(expected)
    assert prompt.attended == attended


def test_a_token_that_is_not_there_is_refused(colbert: ColBERT):
    with pytest.raises(ModelLoadError, match="lacks the query expansion token"):
        colbert(query_expansion=FIXED | {"token": "nowhere"})


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
