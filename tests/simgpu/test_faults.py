"""Faults of code for GPUs that cost memory, time or the whole device, each shown by what the device is asked to do."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio

from tests.lanes import sampled
from tests.models.model_families import ServedModel, write_family
from tests.simgpu.activity import watched
from tests.simgpu.memory import MEMORY
from tests.simgpu.serving import BATCH_TOKENS, KINDS, WAYS, on_simulated_device
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.runner.cuda.graphs import GraphedBackbone
from trio_pool_serve.runner.device_memory import full_batch
from trio_pool_serve.runner.transformer_runner import TransformerRunner
from trio_pool_serve.types import Batch, Embed, PoolingRequest, RenderedPrompt, SparseEmbed


def rows(*lengths: int, params: tuple = (Embed(),)) -> Batch:
    prompts = [RenderedPrompt(np.arange(4, 4 + length, dtype=np.int32) % 40 + 4) for length in lengths]
    return Batch(tuple(PoolingRequest(prompt, params) for prompt in prompts))


def loaded(folder: Path, name: str, way: str = "graphed", **settings: Any) -> TransformerRunner:
    path = KINDS[name].write(folder / "model")
    return KINDS[name].serve(path, **WAYS[way], **settings).runner


def peak_of(runner: TransformerRunner, batch: Batch) -> int:
    """Compute a batch; return the bytes that it needed."""
    MEMORY.peak = before = MEMORY.in_use
    finish(runner, batch)
    return MEMORY.peak - before


def finish(runner: TransformerRunner, batch: Batch) -> None:
    async def launch() -> None:
        await runner.launch(batch)

    trio.run(launch)


# -- attention --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "t5", "clip"])
def test_attention_with_a_mask_makes_no_plan_for_each_shape(tmp_path: Path, name: str):
    """cuDNN would."""
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)
    with on_simulated_device(), watched() as activity:
        runner = loaded(tmp_path, name, "padded")
        before = set(activity.cudnn_plans)
        for lengths in ((5, 3), (9, 4, 2), (12,)):
            finish(runner, rows(*lengths))
    assert activity.attentions
    assert activity.cudnn_plans == before


def test_rows_without_padding_have_no_mask(tmp_path: Path):
    """One of 32,768 tokens would have a mask of a GiB."""
    with on_simulated_device():
        runner = loaded(tmp_path, "bert", "padded")
        with watched() as activity:
            finish(runner, rows(40))
            without = set(activity.masks)
            finish(runner, rows(40, 20))
    assert without == {None}
    assert activity.masks[-1] == (2, 1, 40, 40)


# -- graphs -----------------------------------------------------------------------------------------------


def test_graphs_share_one_pool_on_one_stream_which_does_not_stay_the_current_one(tmp_path: Path):
    """Memory of a pool is used again on the stream that it was allocated on: a stream for each graph shares nothing."""
    with on_simulated_device() as device:
        before, stream = set(MEMORY.pools), torch.get_device_module(device).current_stream(device)
        runner = loaded(tmp_path, "bert")
        assert torch.get_device_module(device).current_stream(device) is stream
        assert isinstance(runner.compute, GraphedBackbone)
        assert len(runner.compute.shapes) > 4
        (pool,) = [MEMORY.pools[key] for key in MEMORY.pools.keys() - before]
        assert len(pool.most) == 1
        tokens = [shape.tokens for shape in runner.compute.shapes]
        assert pool.reserved < 2 * pool.most[next(iter(pool.most))]
        assert sum(tokens) > 3 * max(tokens)


# -- devices ----------------------------------------------------------------------------------------------


async def test_threads_that_launch_and_wait_have_made_the_device_their_own(tmp_path: Path):
    """Else CUDA would make a context on the first GPU."""
    path = write_family(tmp_path / "bert", "bert")
    with on_simulated_device(), watched() as activity:
        runner = ServedModel(path, dtype="bfloat16", device="cuda:1").runner
        assert runner.params.device.index == 1
        handles = []
        launching = threading.Thread(target=lambda: handles.append(runner.launch(rows(5, 3))))
        launching.start()
        launching.join()
        # The thread that waits has had no device, or another one.
        cuda = torch.get_device_module(runner.params.device)
        await trio.to_thread.run_sync(cuda.set_device, torch.device(runner.params.device.type, 0))
        await handles[0]
    assert activity.races == []


# -- memory -----------------------------------------------------------------------------------------------


def test_a_vocabulary_s_logits_are_computed_for_tokens_alone(tmp_path: Path):
    """Padded, one long row would have all others computed in its length."""
    with on_simulated_device():
        runner = loaded(tmp_path, "splade max", "packed")
        batch = rows(40, *[2] * 60, params=(SparseEmbed(),))
        used = peak_of(runner, batch)
        logits = batch.padded_tokens * runner.loaded.backbone.vocab_size * 2
    assert runner.facts.pads is False
    assert used < logits / 2


@sampled("way", WAYS, keep=["packed"])
def test_the_budget_is_what_fits(tmp_path: Path, way: str):
    path = write_family(tmp_path / "bert", "bert")
    with on_simulated_device():
        runner = ServedModel(path, dtype="bfloat16", settings=WAYS[way]).runner
        before = MEMORY.in_use
        assert runner.fitted(BATCH_TOKENS).facts.max_batch_tokens == BATCH_TOKENS
        whole = MEMORY.peak - before
        del runner
    with on_simulated_device():
        small = ServedModel(path, dtype="bfloat16", settings=WAYS[way]).runner
        MEMORY.capacity = MEMORY.in_use + whole * 2 // 3
        small = small.fitted(BATCH_TOKENS)
        budget = small.facts.max_batch_tokens
        assert budget == BATCH_TOKENS // 2
        assert f"batches of {budget} tokens" in str(small.facts)
        finish(small, full_batch(budget, 48, (Embed(),)))


@sampled("way", WAYS, keep=["graphed"])
def test_a_process_that_shares_the_device_takes_its_share_and_no_more(tmp_path: Path, way: str):
    path = write_family(tmp_path / "bert", "bert")
    with on_simulated_device(capacity=2**34):
        alone = ServedModel(path, dtype="bfloat16", settings=WAYS[way]).runner
        before = MEMORY.in_use
        alone = alone.fitted(BATCH_TOKENS)
        whole = MEMORY.peak - before
        del alone
    for part, budget in ((2 / 3, BATCH_TOKENS // 2), (1.0, BATCH_TOKENS)):
        with on_simulated_device(capacity=2**34):
            runner = ServedModel(path, dtype="bfloat16", settings=WAYS[way]).runner
            before, measured = MEMORY.in_use, list[int]()

            def share(free_bytes: Callable[[], int], part: float = part, measured: list[int] = measured) -> int:
                measured.append(free_bytes())
                return int(part * whole) + 4096

            runner = runner.fitted(BATCH_TOKENS, share)
            assert measured == [2**34 - before]
            assert runner.facts.max_batch_tokens == budget
            assert "0.0 GiB of the GPU's memory beside the weights" in str(runner.facts)
            assert MEMORY.peak - before <= int(part * whole) + 4096


def test_a_model_that_leaves_no_memory_is_not_served(tmp_path: Path):
    with on_simulated_device():
        runner = loaded(tmp_path, "bert", fits=False)
        MEMORY.capacity = MEMORY.in_use + 4096
        with pytest.raises(ModelLoadError, match="too little free memory for a batch of 64 tokens"):
            runner.fitted(BATCH_TOKENS)
