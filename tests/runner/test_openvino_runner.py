"""What requests may ask of a model, by OpenVINO and by torch: the same numbers, row by row and in any company."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lanes import sampled
from tests.models import retrieval_families
from tests.models.classifier_families import write_classifier
from tests.models.model_families import NEW_NORMALIZE, Module, dense, load, pooling, write_family
from tests.models.test_openvino_agreement import TOLERANCE, difference
from tests.models.test_reranking_agreement import write_process_reward
from trio_pool_serve.runner.cpu_features import has_native_bfloat16
from trio_pool_serve.runner.openvino.openvino_runner import OpenVinoRunner
from trio_pool_serve.runner.transformer_runner import TransformerRunner
from trio_pool_serve.types import (
    Batch,
    Classify,
    Embed,
    EmbedChunks,
    MaxSim,
    PooledValue,
    PoolingParams,
    PoolingRequest,
    RenderedPrompt,
    SparseEmbed,
    SparseLookup,
    TokenClassify,
    TokenEmbed,
)

pytest.importorskip("openvino")

EXACTLY = {"dtype": "float32"}
BY_OPENVINO = EXACTLY | {"backend": "openvino", "cache_dir": ""}

random = np.random.default_rng(3)


def prompt(length: int, **more: Any) -> RenderedPrompt:
    return RenderedPrompt(random.integers(5, 60, size=length).astype(np.int32), **more)


def kept(*numbers: int) -> dict[str, Any]:
    return {"kept": np.array(numbers, np.bool_)}


def computed(runner: Any, requests: Sequence[PoolingRequest]) -> list[tuple[PooledValue, ...]]:
    return runner.launch(Batch(tuple(requests))).rows


def runners_of(folder: Path) -> tuple[OpenVinoRunner, TransformerRunner]:
    ours, expected = load(folder, **BY_OPENVINO), load(folder, **EXACTLY)
    assert isinstance(ours, OpenVinoRunner)
    return ours, expected


def assert_same(folder: Path, requests: Sequence[PoolingRequest]) -> list[tuple[PooledValue, ...]]:
    """Compare the rows together, each alone, and in the other order; return torch's values."""
    ours, by_torch = runners_of(folder)
    expected = computed(by_torch, requests)
    together = computed(ours, requests)
    alone = [row for request in requests for row in computed(ours, [request])]
    turned = computed(ours, requests[::-1])[::-1]
    for rows in (together, alone, turned):
        for number, (row, of_torch) in enumerate(zip(rows, expected, strict=True)):
            assert len(row) == len(of_torch) == len(requests[number].params)
            for value, other in zip(row, of_torch, strict=True):
                assert np.shape(getattr(value, "values", value)) == np.shape(getattr(other, "values", other))
                assert getattr(value, "values", value).dtype == np.float32
                size = max(1.0, np.abs(getattr(other, "values", other)).max(initial=0))
                assert difference(value, other) < TOLERANCE * size, (number, requests[number].params)
    return expected


def in_turns(prompts: Sequence[RenderedPrompt], *params: PoolingParams) -> Iterator[PoolingRequest]:
    """Ask another thing of each prompt, and everything of the last one."""
    for number, each in enumerate(prompts[:-1]):
        yield PoolingRequest(each, (params[number % len(params)],))
    yield PoolingRequest(prompts[-1], params)


# -- embeddings -------------------------------------------------------------------------------------------

CHUNKS = np.array([[0, 4], [2, 9], [8, 9], [5, 12]], np.int32)
EMBEDS = [
    *(Embed(dimensions, normalize) for normalize in (None, True, False) for dimensions in (None, 1, 7)),
    *(EmbedChunks(dimensions, normalize) for normalize in (None, True, False) for dimensions in (None, 7)),
    *(TokenEmbed(dimensions, normalize) for normalize in (None, True, False) for dimensions in (None, 7)),
]
MODULES = {
    "none": (pooling("mean"),),
    "dense": (pooling("mean"), dense(32, 20), dense(20, 24), Module(type=NEW_NORMALIZE)),
    "dense after two": (pooling(["mean", "max"]), dense(64, 20)),
}


@sampled("modules", MODULES, keep=["dense"])
def test_each_row_has_its_own_params(modules: str, tmp_path: Path):
    segments = np.repeat(np.array([0, 1], np.int32), 6)
    prompts = [
        prompt(12, chunks=CHUNKS, type_ids=segments if number % 3 else None, instruction_tokens=number % 4)
        for number in range(len(EMBEDS))
    ]
    prompts += [prompt(12, chunks=CHUNKS, kept=np.arange(12) % 3 > 0), prompt(3), prompt(1), prompt(40)]
    requests = [*in_turns(prompts, *EMBEDS)]
    requests += [PoolingRequest(each, (TokenEmbed(),)) for each in (prompt(4, **kept(0, 0, 0, 0)), prompt(2))]
    assert_same(write_family(tmp_path / "model", "bert", modules=MODULES[modules]), requests)


POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


@sampled("mode", [*POOLINGS, ["mean", "max"], ["cls", "lasttoken"], [*POOLINGS]], keep=[[*POOLINGS]], ids=str)
def test_every_pooling_type_leaves_out_the_instruction(mode: str | list[str], tmp_path: Path):
    """Where the instruction is the whole input, it is pooled."""
    folder = write_family(tmp_path / "model", "bert", modules=[pooling(mode, include_prompt=False)])
    prompts = [prompt(9), prompt(9, instruction_tokens=4), prompt(5, instruction_tokens=5), prompt(20), prompt(1)]
    chunked = prompt(12, chunks=CHUNKS, instruction_tokens=2)
    params = (Embed(), Embed(normalize=True, dimensions=9))
    assert_same(
        folder, [*(PoolingRequest(each, params) for each in prompts), PoolingRequest(chunked, (EmbedChunks(),))]
    )


@pytest.mark.skipif(not has_native_bfloat16(), reason="this CPU does not compute bfloat16")
def test_in_bfloat16_rows_are_near_those_in_float32(tmp_path: Path):
    folder = write_family(tmp_path / "model", "bert")
    requests = [PoolingRequest(prompt(length), (Embed(),)) for length in (12, 5, 1, 30)]
    ours, exact = load(folder, **BY_OPENVINO | {"dtype": "bfloat16"}), load(folder, **EXACTLY)
    assert "bfloat16 on cpu" in str(ours.facts)
    for (a,), (b,) in zip(computed(ours, requests), computed(exact, requests), strict=True):
        assert 0.999 < a @ b / np.linalg.norm(a) < 1 - 1e-7


# -- late interaction -------------------------------------------------------------------------------------


@sampled(
    "write",
    [
        retrieval_families.colbert_v2,
        retrieval_families.some_tokens_only,  # with the mean of scores
        retrieval_families.pylate_modernbert,
        retrieval_families.jina_colbert,
    ],
    keep=[retrieval_families.colbert_v2, retrieval_families.some_tokens_only],
    ids=lambda write: write.__name__,
)
def test_late_interaction_scores_documents_against_their_own_queries(write: Callable[[Path], Path], tmp_path: Path):
    folder = write(tmp_path / "model")
    by_torch = load(folder, **EXACTLY)
    asked = [prompt(8, attended=5), prompt(8), prompt(3)]
    queries = [value for (value,) in computed(by_torch, [PoolingRequest(each, (TokenEmbed(),)) for each in asked])]
    queries.append(queries[0].astype(np.float16).astype(np.float32)[:0])
    queries[1].setflags(write=False)  # as one from the cache of results
    documents = [prompt(20), prompt(7, **kept(1, 0, 0, 1, 1, 0, 1)), prompt(4, **kept(0, 0, 0, 0)), prompt(1)]
    requests = [PoolingRequest(each, (MaxSim(query),)) for each in documents for query in queries]
    requests += [PoolingRequest(each, (TokenEmbed(), TokenEmbed(6, normalize=False))) for each in (*asked, *documents)]
    requests.append(PoolingRequest(documents[1], (*map(MaxSim, queries), TokenEmbed())))
    expected = assert_same(folder, requests)
    without_kept_tokens = [score for ((score,),) in expected[2 * len(queries) : 3 * len(queries)]]
    divisors = [max(1, len(query)) if write is retrieval_families.some_tokens_only else 1 for query in queries]
    assert without_kept_tokens == pytest.approx([-1e9 / divisor for divisor in divisors])


# -- sparse vectors ---------------------------------------------------------------------------------------


@sampled(
    ("pooling_strategy", "max_weights"),
    [("max", 9), ("sum", 9), ("max", None), ("sum", None), ("max", 10**6)],
    keep=[("max", 9), ("sum", None)],
)
def test_weights_over_the_vocabulary(pooling_strategy: str, max_weights: int | None, tmp_path: Path):
    options: Any = {"pooling_strategy": pooling_strategy, "max_weights": max_weights}
    folder = retrieval_families.write_splade(tmp_path / "model", "bert", **options)
    requests = [PoolingRequest(prompt(length), (SparseEmbed(),)) for length in (30, 2, 1, 9)]
    for (value,) in assert_same(folder, requests):
        assert len(value.indices) == 9 if max_weights == 9 else len(value.indices) > 9


def test_rows_that_are_looked_up_ride_beside_rows_that_are_computed(tmp_path: Path):
    folder = retrieval_families.inference_free(tmp_path / "model")
    looked_up, forwarded = (SparseLookup(),), (SparseEmbed(),)
    asked = [looked_up, forwarded, looked_up, (*looked_up, *forwarded), (*forwarded, *looked_up, *looked_up)]
    requests = [PoolingRequest(prompt(3 + 4 * number), params) for number, params in enumerate(asked)]
    assert_same(folder, requests)
    assert_same(folder, [PoolingRequest(prompt(6), looked_up), PoolingRequest(prompt(2), looked_up)])


def test_one_pass_gives_dense_sparse_and_token_vectors(tmp_path: Path):
    folder = retrieval_families.write_bge_m3(tmp_path / "model")
    every = (Embed(), SparseEmbed(), TokenEmbed(), Embed(normalize=False, dimensions=3), TokenEmbed(dimensions=5))
    prompts = [prompt(12), prompt(3), RenderedPrompt(np.array([7, 7, 9, 7, 0, 2], np.int32)), prompt(25)]
    assert_same(folder, [*in_turns(prompts, *every), PoolingRequest(prompt(5), every)])


# -- labels -----------------------------------------------------------------------------------------------

ACTIVATIONS = ("probabilities", "score", "raw")


@sampled("name", ["bert", "deberta-v2", "qwen2", "distilbert"], keep=["bert", "qwen2"])
def test_each_row_has_its_own_activation(name: str, tmp_path: Path):
    folder = write_classifier(tmp_path / "model", name, num_labels=3)
    segments = {"type_ids": np.repeat(np.array([0, 1], np.int32), [4, 6])} if name == "bert" else {}
    prompts = [prompt(10, **segments), prompt(2), prompt(30), prompt(10), prompt(1)]
    assert_same(folder, [*in_turns(prompts, *map(Classify, ACTIVATIONS))])


def test_labels_of_tokens_are_those_of_kept_tokens(tmp_path: Path):
    folder = write_classifier(tmp_path / "model", "bert", head="TokenClassification", num_labels=3)
    prompts = [prompt(4, **kept(0, 1, 1, 0)), prompt(9), prompt(2, **kept(0, 0)), prompt(3), prompt(5)]
    assert_same(folder, [*in_turns(prompts, *map(TokenClassify, ACTIVATIONS))])


def test_steps_are_scored_where_they_end(tmp_path: Path):
    folder = write_process_reward(tmp_path / "model", sharded=False)
    ours = load(folder, **BY_OPENVINO)
    step = ours.heads[TokenClassify].step_token_id
    prompts = [prompt(12), prompt(3), prompt(9), prompt(4)]
    for each, places in zip(prompts, ([2, 11], [], [0], [1, 2]), strict=True):
        each.token_ids[places] = step
    expected = assert_same(folder, [*in_turns(prompts, *map(TokenClassify, ACTIVATIONS))])
    assert [len(row[0]) for row in expected] == [2, 0, 1, 2]


# -- token embeddings -------------------------------------------------------------------------------------


def test_rows_of_token_embeddings_are_computed_by_torch_beside_others(tmp_path: Path):
    ours, by_torch = runners_of(write_family(tmp_path / "model", "bert"))
    width = by_torch.facts.embeds_width
    assert (ours.facts.embeds_width, width) == (0, 32)
    ours = load(tmp_path / "model", takes_embeds=True, **BY_OPENVINO)
    assert ours.facts.embeds_width == width
    embeds = random.standard_normal((6, width)).astype(np.float32)
    of_embeds = PoolingRequest(RenderedPrompt(np.zeros(6, np.int32), embeds=embeds), (Embed(),))
    others = [PoolingRequest(prompt(length), (Embed(),)) for length in (9, 2)]
    for requests in ([others[0], of_embeds, others[1], of_embeds], [of_embeds]):
        pairs = zip(computed(ours, requests), computed(by_torch, requests), strict=True)
        assert all(difference(a, b) < TOLERANCE for (a,), (b,) in pairs)


def test_values_are_not_overwritten_by_the_next_pass(tmp_path: Path):
    """Of every head: OpenVINO's outputs are buffers that it uses again."""
    folder = retrieval_families.write_bge_m3(tmp_path / "model")
    ours = load(folder, **BY_OPENVINO)
    every = (Embed(), Embed(normalize=False), TokenEmbed(normalize=False), SparseEmbed())
    for params in (every, *((each,) for each in every)):
        first = computed(ours, [PoolingRequest(prompt(12), params)])[0]
        copies = [np.copy(getattr(value, "values", value)) for value in first]
        computed(ours, [PoolingRequest(prompt(12), params)])
        for value, copy in zip(first, copies, strict=True):
            assert np.array_equal(getattr(value, "values", value), copy)
