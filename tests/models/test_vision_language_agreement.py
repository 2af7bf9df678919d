"""Beside images, token embeddings have the vectors of their texts; a bare folder is pooled by the mean."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import frozen

from tests.models.model_families import largest_difference, shuffled
from tests.models.vision_families import CONTENTS, VISION_LANGUAGE, SeeingModel, qwen_states
from tests.models.vision_oracles import chat_template_kwargs, last_at_unit_length
from trio_pool_serve.models.loading.renderer_loading import embeds_format_of
from trio_pool_serve.rendering.prompt_embeds import EmbedsFormat
from trio_pool_serve.types import Batch, Embed, PoolingRequest, RenderedPrompt, Vectors

TOLERANCE = 1e-5


@frozen(eq=False)
class Pair:
    """One folder, served here, its rows for CONTENTS, and the vectors that the oracle has for them."""

    family: str
    ours: SeeingModel
    rows: list[PoolingRequest]
    vectors: Vectors


IN_EACH_RUN = ("qwen2_vl", "qwen3_vl")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in IN_EACH_RUN else pytest.mark.slow) for name in VISION_LANGUAGE],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = VISION_LANGUAGE[request.param](tmp_path_factory.mktemp("seeing") / request.param)
    ours = SeeingModel(path)
    rows = [PoolingRequest(ours.in_conversation(content), (Embed(),)) for content in CONTENTS]
    return Pair(
        request.param, ours, rows, last_at_unit_length(qwen_states(path, CONTENTS, **chat_template_kwargs(path)))
    )


async def test_embeddings_in_place_of_ids_agree_alone_and_beside_images(
    pair: Pair, record_agreement: Callable[..., None]
):
    assert isinstance(embeds_format_of(pair.ours.folder, pair.ours.runner.embeds_width, enabled=True), EmbedsFormat)
    backbone, launch = pair.ours.runner.backbone, pair.ours.runner.launch
    texts = [index for index, request in enumerate(pair.rows) if request.prompt.images is None]
    embedded = []
    for index in texts:
        ids = torch.from_numpy(pair.rows[index].prompt.token_ids.astype(np.int64))
        prompt = RenderedPrompt(np.zeros(len(ids), dtype=np.int32), embeds=backbone.embed(ids).detach().numpy())
        embedded.append(PoolingRequest(prompt, (Embed(),)))
    assert 0 < len(texts) < len(CONTENTS)
    alone = [(await launch(Batch((request,))))[0][0] for request in embedded]
    batch, order = [*pair.rows, *embedded], shuffled([*pair.rows, *embedded])
    rows = [vector for (vector,) in await launch(Batch(tuple(batch[index] for index in order)))]
    expected = np.concatenate([pair.vectors, pair.vectors[texts]])[order]
    difference = max(largest_difference(alone, pair.vectors[texts]), largest_difference(rows, expected))
    assert difference < TOLERANCE
    record_agreement(pair.family, "embed", "transformers", difference)


async def test_the_embedding_of_the_placeholder_fails_no_batch(pair: Pair):
    """A client can send what the model has in the place of an image; the model takes it for one."""
    backbone, launch = pair.ours.runner.backbone, pair.ours.runner.launch
    placeholder = backbone.embed(torch.tensor([pair.ours.images.token_id] * 3)).detach().numpy()
    hostile = PoolingRequest(RenderedPrompt(np.zeros(3, dtype=np.int32), embeds=placeholder), (Embed(),))
    _, *rows = [vector for (vector,) in await launch(Batch((hostile, *pair.rows)))]
    assert largest_difference(rows, pair.vectors) < TOLERANCE


async def test_a_bare_folder_is_pooled_by_mean(pair: Pair, tmp_path: Path):
    path = VISION_LANGUAGE[pair.family](tmp_path / "bare")
    for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        (path / name).unlink()
    bare = SeeingModel(path)
    batch = Batch(tuple(PoolingRequest(bare.in_conversation(content), (Embed(),)) for content in CONTENTS))
    rows = [vector for (vector,) in await bare.runner.launch(batch)]
    assert largest_difference(rows, [states.mean(axis=0) for states in qwen_states(path, CONTENTS)]) < 10 * TOLERANCE
