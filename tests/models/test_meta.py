"""A launch reads no number from the device: it works on one that has none.

Whatever reads one waits for all that was launched before. Tensors on torch's ``meta`` device have shapes alone, and
reading one is an error.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models.model_families import FAMILIES, HIDDEN, ServedModel, write_family
from tests.runner.test_varlen import PACKED, packed_backbone
from trio_pool_serve.runner.cuda.varlen import FLASH, has_flash
from trio_pool_serve.runner.forward_pass import ForwardPass, assemble
from trio_pool_serve.runner.transformer_masks import skip_mask_checks
from trio_pool_serve.types import PoolingRequest, RenderedPrompt

META = torch.device("meta")
LENGTHS = ((5, 1, 12), (6, 6))


def rows_on_meta(*lengths: int) -> ForwardPass:
    rows = [PoolingRequest(RenderedPrompt(np.arange(4, 4 + length, dtype=np.int32))) for length in lengths]
    return assemble(rows, pad_token_id=0, device=META)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", FAMILIES)
def test_padded_rows_are_launched_without_reading_the_device(tmp_path: Path, name: str, lengths: tuple[int, ...]):
    backbone = ServedModel(write_family(tmp_path / name, name), dtype="bfloat16").runner.backbone
    backbone.model.to(META)
    skip_mask_checks(backbone.model)
    with torch.inference_mode():
        assert backbone(rows_on_meta(*lengths)).shape == (len(lengths), max(lengths), HIDDEN)


def test_transformers_own_masks_read_the_device(tmp_path: Path):
    """Else the test above would prove nothing."""
    backbone = ServedModel(write_family(tmp_path / "bert", "bert"), dtype="bfloat16").runner.backbone
    backbone.model.to(META)
    with pytest.raises(RuntimeError, match="meta"), torch.inference_mode():
        backbone(rows_on_meta(*LENGTHS[0]))


@pytest.mark.skipif(not has_flash(), reason="this torch has no such attention")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", PACKED)
def test_packed_rows_are_launched_without_reading_the_device(tmp_path: Path, name: str, lengths: tuple[int, ...]):
    served = ServedModel(write_family(tmp_path / name, name), dtype="bfloat16")
    packed = packed_backbone(served)
    packed.attention = FLASH
    served.runner.backbone.model.to(META)
    with torch.inference_mode():
        assert packed(rows_on_meta(*lengths)).shape == (len(lengths), max(lengths), HIDDEN)
