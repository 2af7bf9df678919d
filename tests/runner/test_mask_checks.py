"""A mask is made without looking at it, and is the same."""

from pathlib import Path

import pytest
import torch
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from tests.models.model_families import FAMILIES, TEXTS, ServedModel, largest_difference, write_family
from trio_pool_serve.runner.transformer_masks import skip_mask_checks, without_synchronisation


def test_what_a_mask_holds_is_not_looked_at():
    """A tensor on this device has no numbers that could be read."""
    mask = torch.ones((2, 3), dtype=torch.bool, device="meta")
    options = {"batch_size": 2, "q_length": 3, "kv_length": 3, "attention_mask": mask, "device": "meta"}
    options |= {"mask_function": bidirectional_mask_function}
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
    with pytest.raises((RuntimeError, NotImplementedError)):
        sdpa_mask(**options)
    made = without_synchronisation(sdpa_mask)(**options)
    assert made is not None
    assert made.shape == (2, 1, 3, 3)


@pytest.mark.parametrize("name", FAMILIES)
async def test_every_family_computes_the_same(tmp_path: Path, name: str):
    served = ServedModel(write_family(tmp_path / name, name))
    expected = await served.embed(TEXTS)
    alone = [(await served.embed([text]))[0] for text in TEXTS]
    skip_mask_checks(served.runner.backbone.model)
    assert largest_difference(await served.embed(TEXTS), expected) < 1e-5
    assert largest_difference([(await served.embed([text]))[0] for text in TEXTS], alone) < 1e-5
