"""Rows that lie one after the other give what padded rows give, or the model is padded."""

import inspect
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from tests.models.classifier_families import POOLED, PROMPTS, write_classifier
from tests.models.model_families import (
    FAMILIES,
    TEXTS,
    ServedModel,
    largest_difference,
    write_family,
    write_weighted_layers,
)
from trio_pool_serve.runner.cuda import varlen
from trio_pool_serve.runner.cuda.packed_backbone import PackedBackbone, pack_backbone
from trio_pool_serve.runner.cuda.varlen import CannotPackError
from trio_pool_serve.types import Batch, Classify, Embed, PoolingRequest, RenderedPrompt, TokenEmbed

CPU = torch.device("cpu")
TOLERANCE = 1e-5
PADDED = {"mpnet": "its states differ", "t5": "its positions cannot be given", "lfm2": "its states differ"}
"""Families whose attention adds a bias of its own, which no kernel takes, or whose convolutions mix neighbours."""
PACKED = [name for name in FAMILIES if name not in PADDED]


def packed_backbone(served: ServedModel) -> PackedBackbone:
    """What a GPU computes by its kernel, computed segment by segment."""
    return pack_backbone(served.runner.loaded.backbone, served.runner.params)


def serve_packed(served: ServedModel) -> ServedModel:
    served.runner = evolve(served.runner, compute=packed_backbone(served))
    return served


@pytest.fixture(scope="module", params=PACKED)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("family") / request.param, request.param)


@pytest.fixture(scope="module")
def padded(path: Path) -> ServedModel:
    return ServedModel(path)


@pytest.fixture(scope="module")
def packed(path: Path) -> ServedModel:
    return serve_packed(ServedModel(path))


async def test_vectors_and_token_vectors_of_mixed_lengths_agree_shuffled_and_alone(
    padded: ServedModel, packed: ServedModel
):
    wanted = (Embed(), TokenEmbed())
    texts = random.Random(7).sample([*TEXTS, *TEXTS], 2 * len(TEXTS))
    theirs, together = await padded.values(texts, *wanted), await packed.values(texts, *wanted)
    alone = [(await packed.values([text], *wanted))[0] for text in texts]
    for ours in (together, alone):
        for index in range(2):
            assert largest_difference([row[index] for row in ours], [row[index] for row in theirs]) < TOLERANCE


async def test_rows_with_padding_tokens_inside_agree(padded: ServedModel, packed: ServedModel):
    """A client may send any ids; RoBERTa gives those no position of their own."""
    pad = padded.runner.params.pad_token_id
    rows = [[4, pad, 5, 6, pad, pad, 7], [8, 9], [pad, 4]]
    batch = Batch(tuple(PoolingRequest(RenderedPrompt(np.array(row, dtype=np.int32))) for row in rows))
    theirs, ours = await padded.runner.launch(batch), await packed.runner.launch(batch)
    assert largest_difference([row[0] for row in ours], [row[0] for row in theirs]) < TOLERANCE


async def test_weighted_layers_agree(tmp_path: Path):
    served = ServedModel(write_weighted_layers(tmp_path / "bert", "bert"))
    expected = await served.values(TEXTS, Embed(), TokenEmbed())
    ours = await serve_packed(served).values(TEXTS, Embed(), TokenEmbed())
    assert max(largest_difference(row, other) for row, other in zip(ours, expected, strict=True)) < TOLERANCE


@pytest.mark.parametrize("name", PADDED)
async def test_a_family_that_computes_otherwise_is_padded_as_before(tmp_path: Path, name: str):
    served = ServedModel(write_family(tmp_path / name, name))
    before = await served.embed(TEXTS)
    with pytest.raises(CannotPackError, match=PADDED[name]):
        packed_backbone(served)
    assert largest_difference(await served.embed(TEXTS), before) == 0


@pytest.mark.parametrize(
    "read",
    [
        lambda states: states.mean(dim=1, keepdim=True),  # a bias by a number of the whole batch
        lambda states: torch.nn.functional.pad(states, (0, 0, 1, -1)),  # a causal convolution
    ],
)
def test_rows_that_read_one_another_are_noticed(read: Any, tmp_path: Path):
    served = ServedModel(write_family(tmp_path / "bert", "bert"))

    def mix(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 1e-6 * read(output)

    served.runner.loaded.backbone.model.embeddings.register_forward_hook(mix)
    with pytest.raises(CannotPackError, match="its rows depend on one another"):
        packed_backbone(served)


async def test_a_row_that_brings_embeddings_is_packed_too(padded: ServedModel, packed: ServedModel):
    """Its ids stand for nothing, not even for padding, which RoBERTa gives no position."""
    computed_packed: Any = packed.runner.compute
    assert computed_packed.takes_embeds
    requests = await packed.requests(TEXTS[:2])
    ids = requests[0].prompt.token_ids
    embeds = packed.runner.loaded.backbone.embed(torch.from_numpy(ids.astype(np.int64))).detach().float().numpy()
    of_embeds = PoolingRequest(RenderedPrompt(np.full_like(ids, padded.runner.params.pad_token_id), embeds=embeds))
    rows = await packed.runner.launch(Batch((of_embeds, requests[1])))
    assert largest_difference([row[0] for row in rows], await padded.embed(TEXTS[:2])) < TOLERANCE


@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "modernbert", "distilbert", *POOLED])
async def test_cross_encoders_agree(tmp_path: Path, name: str):
    """Their own heads, if they are not of modules, read the first token of each row, behind the transformer."""
    write = POOLED.get(name) or partial(write_classifier, name=name, num_labels=1)
    served = ServedModel(write(tmp_path / name))
    expected = await served.compute(PROMPTS, Classify("raw"))
    assert largest_difference(await serve_packed(served).compute(PROMPTS, Classify("raw")), expected) < TOLERANCE


async def test_a_row_that_is_not_attended_to_as_a_whole_is_computed_beside_packed_ones(minilm: Path):
    served = ServedModel(minilm)
    plain = await served.requests(TEXTS[:2])
    ids = plain[1].prompt.token_ids
    expanded = PoolingRequest(RenderedPrompt(np.append(ids, ids[-3:]), attended=len(ids)))
    batch = Batch((expanded, *plain))
    expected = await served.runner.launch(batch)
    rows = await serve_packed(served).runner.launch(batch)
    assert largest_difference([row[0] for row in rows], [row[0] for row in expected]) < TOLERANCE


def test_attention_needs_windows_but_no_parameter_for_shared_keys(monkeypatch: pytest.MonkeyPatch):
    """The attention of torch 2.11 has windows, and no such parameter."""
    heads: list[tuple[int, int]] = []

    def attend(query: Any, key: Any, *_: Any, scale: float, window_size: tuple[int, int]) -> torch.Tensor:
        heads.append((query.shape[1], key.shape[1]))
        return query

    monkeypatch.setattr(varlen, "FLASH_PARAMETERS", {"query", "key", "value", "scale"})
    assert not varlen.has_flash()
    monkeypatch.setattr(varlen, "FLASH_PARAMETERS", inspect.signature(attend).parameters.keys())
    monkeypatch.setattr(varlen, "varlen_attn", attend)
    assert varlen.has_flash()
    query, key = torch.zeros(1, 4, 3, 8, device="meta"), torch.zeros(1, 2, 3, 8, device="meta")
    bounds = {"cu_seq_lens_q": torch.tensor([0, 3]), "max_length_q": 3}
    rows, _ = varlen.attend_within_segments(torch.nn.Identity(), query, key, key, None, 1.0, is_causal=False, **bounds)
    assert rows.shape == (1, 3, 4, 8)
    assert heads == [(4, 2)]


@pytest.mark.usefixtures("new_compiler")
def test_attention_on_a_gpu_is_compiled_in_one_piece_for_any_number_of_tokens():
    """On a device without data: what runs there is the compiler's."""

    class Attention(torch.nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, begins: torch.Tensor, longest: int) -> torch.Tensor:
            options = {"is_causal": False, "cu_seq_lens_q": begins, "max_length_q": longest}
            return varlen.attend_within_segments(self, query, key, key, None, 1.0, **options)[0]

    compiled = torch.compile(Attention(), dynamic=True, backend="eager", fullgraph=True)
    for tokens in (37, 91):
        query, key = torch.zeros(1, 4, tokens, 8, device="meta"), torch.zeros(1, 2, tokens, 8, device="meta")
        begins = torch.zeros(5, dtype=torch.int32, device="meta")
        assert compiled(query, key, begins, tokens - 9).shape == (1, tokens, 4, 8)
        torch.compiler.set_stance("fail_on_recompile")
