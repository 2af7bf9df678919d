"""A text's own token embeddings, sent in its place, give the text's vector; families that cannot do that say so."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from attrs import frozen

from tests.models.classifier_families import write_classifier
from tests.models.model_families import (
    LOADED_BY_ORACLE,
    TEXTS,
    ServedModel,
    largest_difference,
    reference,
    write_family,
)
from tests.models.retrieval_families import pylate_bert, splade_max
from tests.models.vision_families import clip, colpali, colqwen2, siglip, siglip2_naflex
from trio_pool_serve.models.loading.renderer_loading import embeds_format_of
from trio_pool_serve.rendering.prompt_embeds import EmbedsFormat
from trio_pool_serve.types import Batch, Classify, Embed, PoolingRequest, RenderedPrompt, TokenClassify

TOLERANCE = 1e-5
KEPT = [text for text in TEXTS if text]


def of_embeds(embeds: npt.NDArray[np.float32], *params: Any) -> PoolingRequest:
    prompt = RenderedPrompt(np.zeros(len(embeds), dtype=np.int32), embeds=embeds)
    return PoolingRequest(prompt, params or (Embed(),))


def own_embeds(model: torch.nn.Module, requests: Sequence[PoolingRequest]) -> list[npt.NDArray[np.float32]]:
    """What a model of transformers makes of token ids first."""
    embedding: Any = model.get_input_embeddings()
    ids = [torch.from_numpy(request.prompt.token_ids.astype(np.int64)) for request in requests]
    return [embedding(row).detach().numpy() for row in ids]


@frozen(eq=False)
class Pair:
    """A folder here, its vectors there, and the embeddings there of the tokens that both read."""

    ours: ServedModel
    expected: npt.NDArray[np.float32]
    texts: list[PoolingRequest]
    embeds: list[PoolingRequest]


@pytest.fixture(params=LOADED_BY_ORACLE)
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    path = write_family(tmp_path / request.param, request.param)
    oracle = write_family(tmp_path / "oracle", request.param, as_published=False)
    ours, theirs = ServedModel(path), reference(oracle)
    texts = await ours.requests(KEPT)
    embeds = [of_embeds(row) for row in own_embeds(theirs[0].auto_model, texts)]
    return Pair(ours, theirs.encode(KEPT), texts, embeds)


async def test_embeddings_in_place_of_ids_agree_alone_and_in_mixed_batches(pair: Pair):
    """The ids beside the embeddings are zeros."""
    assert pair.ours.runner.facts.embeds_width == pair.embeds[0].prompt.embeds.shape[1]
    launch = pair.ours.runner.launch
    alone = [(await launch(Batch((request,))))[0][0] for request in pair.embeds]
    together = [vector for (vector,) in await launch(Batch(tuple(pair.embeds)))]
    mixed = [one for both in zip(pair.embeds, pair.texts, strict=True) for one in both]
    rows = [vector for (vector,) in await launch(Batch(tuple(mixed)))]
    for vectors in (alone, together, rows[::2], rows[1::2]):
        assert largest_difference(vectors, pair.expected) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
async def test_narrow_numbers_are_read_as_the_same_ones_in_float32(pair: Pair, dtype: torch.dtype):
    narrow = [torch.from_numpy(request.prompt.embeds).to(dtype) for request in pair.embeds]
    held = [of_embeds((row if dtype == torch.float16 else row.view(torch.uint16)).numpy()) for row in narrow]
    wide = [of_embeds(row.float().numpy()) for row in narrow]
    launch = pair.ours.runner.launch
    rows, expected = [[row for (row,) in await launch(Batch(tuple(batch)))] for batch in (held + pair.texts, wide)]
    assert largest_difference(rows[: len(wide)], np.stack(expected)) < TOLERANCE
    assert largest_difference(rows[len(wide) :], pair.expected) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "head"),
    [("bert", "SequenceClassification"), ("qwen3", "SequenceClassification"), ("bert", "TokenClassification")],
)
async def test_classes_of_embeddings_are_those_of_the_text(name: str, head: str, tmp_path: Path):
    path = write_classifier(tmp_path / "model", name, head, id2label={0: "calm", 1: "glad", 2: "cross"})
    ours, theirs = ServedModel(path), getattr(transformers, f"AutoModelFor{head}").from_pretrained(path).eval()
    embeds = own_embeds(theirs, await ours.requests(KEPT))
    with torch.inference_mode():
        expected = [theirs(inputs_embeds=torch.from_numpy(row)[None]).logits.softmax(-1)[0].numpy() for row in embeds]
    params = Classify() if head == "SequenceClassification" else TokenClassify()
    rows = await ours.runner.launch(Batch(tuple(of_embeds(row, params) for row in embeds)))
    assert largest_difference([row for (row,) in rows], expected) < TOLERANCE


@pytest.mark.parametrize("write", [pylate_bert, splade_max, clip, siglip, siglip2_naflex, colqwen2, colpali])
def test_models_that_look_at_the_tokens_themselves_say_that_they_do(tmp_path: Path, write: Any):
    ours = ServedModel(write(tmp_path / "model"))
    asked = embeds_format_of(ours.folder, ours.runner.facts.embeds_width, enabled=True)
    assert isinstance(asked, str)
    assert "requires token ids" in asked


def test_a_forward_pass_without_such_an_argument_says_so(minilm: Path):
    ours = ServedModel(minilm)
    assert embeds_format_of(ours.folder, ours.runner.facts.embeds_width, enabled=True) == EmbedsFormat(384, 256)
    assert "not accept token embeddings" in str(embeds_format_of(ours.folder, 0, enabled=True))
    assert "--enable-prompt-embeds" in str(embeds_format_of(ours.folder, 384, enabled=False))
