"""Requests become tensors, each row with what its prompt says."""

import numpy as np
import pytest
import torch

from trio_pool_serve.runner.forward_pass import ForwardPass, assemble
from trio_pool_serve.types import PoolingRequest, RenderedPrompt

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def assembled(*prompts: RenderedPrompt) -> ForwardPass:
    return assemble([PoolingRequest(prompt) for prompt in prompts], pad_token_id=9, device=CPU)


def test_each_row_has_what_its_prompt_says():
    forward = assembled(
        RenderedPrompt(ids(1, 2, 3, 4), instruction_tokens=2),
        RenderedPrompt(ids(5), instruction_tokens=1, kept=np.array([False])),
        RenderedPrompt(ids(6, 7, 8), type_ids=ids(0, 1, 1), attended=2, kept=np.array([True, False, True])),
    )
    assert forward.input_ids.tolist() == [[1, 2, 3, 4], [5, 9, 9, 9], [6, 7, 8, 9]]
    assert forward.attention_mask.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert forward.type_ids.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0]]
    assert forward.pooled.int().tolist() == [[0, 0, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]]
    assert forward.kept.int().tolist() == [[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]]
