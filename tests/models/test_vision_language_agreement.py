"""Inputs of texts and images have the vectors that transformers gives them, pooled as the folder says.

The oracle pads on the left, as Qwen's tokenizers do; here rows are padded on the right.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from attrs import frozen

from tests.models.model_families import largest_difference, shuffled
from tests.models.vision_families import (
    CONTENTS,
    VISION_LANGUAGE,
    Content,
    SeeingModel,
    qwen_states,
    qwen_text,
)
from tests.models.vision_oracles import chat_template_kwargs, last_at_unit_length
from trio_pool_serve.models.loading.renderer_loading import embeds_format_of
from trio_pool_serve.rendering.prompt_embeds import EmbedsFormat
from trio_pool_serve.types import Batch, Embed, PoolingParams, PoolingRequest, RenderedPrompt, TokenEmbed, Vectors

TOLERANCE = 1e-5


@frozen(eq=False)
class Pair:
    """One folder, served here, and the states that the oracle has for CONTENTS."""

    family: str
    ours: SeeingModel
    states: Sequence[Vectors]

    @property
    def vectors(self) -> Vectors:
        """The last token's, at unit length."""
        return last_at_unit_length(self.states)

    def render(self, content: Content, **more: Any) -> RenderedPrompt:
        """Put the images into the conversation that sentence-transformers makes."""
        options = chat_template_kwargs(self.ours.path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.ours.path)
        ids = np.array(tokenizer(qwen_text(self.ours.path, content, **more, **options))["input_ids"], dtype=np.int32)
        pictures = [part for part in content if not isinstance(part, str)]
        return self.ours.images.expand(ids, [self.ours.images.processor(picture) for picture in pictures])

    async def compute(self, contents: Sequence[Content], params: PoolingParams, **more: Any) -> list[Any]:
        requests = [PoolingRequest(self.render(content, **more), (params,)) for content in contents]
        return [value for (value,) in await self.ours.runner.launch(Batch(tuple(requests)))]


IN_EACH_RUN = ("qwen2_vl", "qwen3_vl")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in IN_EACH_RUN else pytest.mark.slow) for name in VISION_LANGUAGE],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = VISION_LANGUAGE[request.param](tmp_path_factory.mktemp("seeing") / request.param)
    ours = SeeingModel(path)
    return Pair(request.param, ours, qwen_states(path, CONTENTS, **chat_template_kwargs(path)))


async def test_each_alone_agrees(pair: Pair, record_agreement: Callable[..., None]):
    rows = [(await pair.compute([content], Embed()))[0] for content in CONTENTS]
    difference = largest_difference(rows, pair.vectors)
    assert difference < TOLERANCE
    record_agreement(pair.family, "embed", "transformers", difference)


async def test_texts_and_images_in_one_shuffled_batch_agree(pair: Pair, record_agreement: Callable[..., None]):
    order = shuffled(CONTENTS)
    rows = await pair.compute([CONTENTS[index] for index in order], Embed())
    difference = largest_difference(rows, pair.vectors[order])
    assert difference < TOLERANCE
    record_agreement(pair.family, "embed", "transformers", difference)


async def test_the_tokens_agree(pair: Pair, record_agreement: Callable[..., None]):
    rows = await pair.compute(CONTENTS, TokenEmbed())
    difference = largest_difference(rows, pair.states)
    assert difference < 10 * TOLERANCE  # states are not of unit length
    record_agreement(pair.family, "token_embed", "transformers", difference)


async def test_texts_alone_agree_after_images(pair: Pair):
    """A model remembers where the last image put its positions."""
    texts = [index for index, content in enumerate(CONTENTS) if all(isinstance(part, str) for part in content)]
    await pair.compute(CONTENTS, Embed())
    rows = await pair.compute([CONTENTS[index] for index in texts], Embed())
    assert largest_difference(rows, pair.vectors[texts]) < TOLERANCE


async def test_embeddings_in_place_of_ids_agree_alone_and_beside_images(
    pair: Pair, record_agreement: Callable[..., None]
):
    assert isinstance(embeds_format_of(pair.ours.folder, pair.ours.runner.embeds_width, enabled=True), EmbedsFormat)
    backbone, launch = pair.ours.runner.backbone, pair.ours.runner.launch
    whole = [PoolingRequest(pair.render(content), (Embed(),)) for content in CONTENTS]
    texts = [index for index, request in enumerate(whole) if request.prompt.images is None]
    embedded = []
    for index in texts:
        ids = torch.from_numpy(whole[index].prompt.token_ids.astype(np.int64))
        prompt = RenderedPrompt(np.zeros(len(ids), dtype=np.int32), embeds=backbone.embed(ids).detach().numpy())
        embedded.append(PoolingRequest(prompt, (Embed(),)))
    assert 0 < len(texts) < len(CONTENTS)
    alone = [(await launch(Batch((request,))))[0][0] for request in embedded]
    batch, order = [*whole, *embedded], shuffled([*whole, *embedded])
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
    whole = [PoolingRequest(pair.render(content), (Embed(),)) for content in CONTENTS]
    _, *rows = [vector for (vector,) in await launch(Batch((hostile, *whole)))]
    assert largest_difference(rows, pair.vectors) < TOLERANCE


async def test_an_instruction_is_a_system_message(pair: Pair):
    instruction = pair.ours.folder.prompts["query"]
    states = qwen_states(pair.ours.path, CONTENTS[:3], instruction=instruction, **chat_template_kwargs(pair.ours.path))
    rows = await pair.compute(CONTENTS[:3], Embed(), instruction=instruction)
    assert largest_difference(rows, last_at_unit_length(states)) < TOLERANCE


def test_the_items_are_told_apart(pair: Pair):
    """Else agreement would prove nothing."""
    assert (pair.vectors @ pair.vectors.T - np.eye(len(CONTENTS))).max() < 0.999


async def test_a_bare_folder_is_pooled_by_mean(pair: Pair, tmp_path: Path):
    path = VISION_LANGUAGE[pair.family](tmp_path / "bare")
    for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        (path / name).unlink()
    bare = Pair(pair.family, SeeingModel(path), qwen_states(path, CONTENTS))
    rows = await bare.compute(CONTENTS, Embed())
    assert largest_difference(rows, [states.mean(axis=0) for states in bare.states]) < 10 * TOLERANCE
