"""Requests become tensors, each row with what its prompt says."""

import numpy as np
import torch
from attrs import evolve

from trio_pool_serve.runner.forward_pass import ForwardPass
from trio_pool_serve.runner.row_states import RowStates
from trio_pool_serve.types import PoolingRequest, RenderedPrompt


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def test_each_row_has_what_its_prompt_says():
    prompts = (
        RenderedPrompt(ids(1, 2, 3, 4), instruction_tokens=2),
        RenderedPrompt(ids(5), instruction_tokens=1, kept=np.array([False])),
        RenderedPrompt(ids(6, 7, 8), type_ids=ids(0, 1, 1), attended=2, kept=np.array([True, False, True])),
    )
    forward = ForwardPass([*map(PoolingRequest, prompts)], 9, torch.device("cpu"))
    assert forward.input_ids.tolist() == [[1, 2, 3, 4], [5, 9, 9, 9], [6, 7, 8, 9]]
    assert forward.attention_mask.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert forward.type_ids.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0]]
    assert forward.lengths.tolist() == [4, 1, 3]
    assert forward.skipped.tolist() == [2, 0, 0]
    assert forward.attended.tolist() == [4, 1, 2]
    states = RowStates.of_output(torch.arange(12).view(3, 4, 1), forward.lengths)
    kept, counts = evolve(forward, states=states).kept_states()
    assert kept.flatten().tolist() == [0, 1, 2, 3, 8, 10]
    assert counts.tolist() == [4, 0, 2]
