"""Requests become tensors, each row with what its prompt says."""

import numpy as np
import torch
from attrs import evolve

from trio_pool_serve.runner.forward_pass import ForwardPass
from trio_pool_serve.runner.row_states import RowStates, concatenate
from trio_pool_serve.types import PoolingRequest, RenderedPrompt

CPU = torch.device("cpu")


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def assembled(*prompts: RenderedPrompt) -> ForwardPass:
    return ForwardPass([PoolingRequest(prompt) for prompt in prompts], 9, CPU)


def test_each_row_has_what_its_prompt_says():
    forward = assembled(
        RenderedPrompt(ids(1, 2, 3, 4), instruction_tokens=2),
        RenderedPrompt(ids(5), instruction_tokens=1, kept=np.array([False])),
        RenderedPrompt(ids(6, 7, 8), type_ids=ids(0, 1, 1), attended=2, kept=np.array([True, False, True])),
    )
    assert forward.input_ids.tolist() == [[1, 2, 3, 4], [5, 9, 9, 9], [6, 7, 8, 9]]
    assert forward.attention_mask.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert forward.type_ids.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0]]
    assert forward.lengths.tolist() == [4, 1, 3]
    assert forward.skipped.tolist() == [2, 0, 0]
    assert forward.attended.tolist() == [4, 1, 2]


def test_the_states_of_kept_tokens_are_taken_from_padded_rows():
    forward = assembled(
        RenderedPrompt(ids(1, 2, 3)),
        RenderedPrompt(ids(5), kept=np.array([False])),
        RenderedPrompt(ids(6, 7), kept=np.array([False, True])),
    )
    states = torch.arange(9).view(3, 3, 1)
    taken, counts = evolve(forward, states=RowStates.of_output(states, forward.lengths)).kept_states()
    assert taken.flatten().tolist() == [0, 1, 2, 7]
    assert counts.tolist() == [3, 0, 1]


def test_states_of_parts_are_those_of_the_batch():
    padded = RowStates.of_output(torch.arange(4).view(2, 2, 1), np.array([2, 1]))
    packed = RowStates(torch.arange(10, 13)[:, None], np.array([0]), np.array([3]))
    whole = concatenate([padded, packed], [[0, 2], [1]])
    assert whole.at(whole.cells).flatten().tolist() == [0, 1, 10, 11, 12, 2]
