"""How many kernels the blocks of each family take, eager and compiled.

python -m tests.runner.fused_kernels    # writes the record of docs/gpu-launches.md
"""

import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.kept_folders import keeping_in
from tests.models.model_families import ServedModel, write_family
from trio_pool_serve.runner.cuda.fused_blocks import compiler_files_in, fuse, twin_of
from trio_pool_serve.runner.cuda.packed_backbone import PackedBackbone, pack_backbone
from trio_pool_serve.runner.cuda.packed_inputs import PackedInputs, PackedShape

RECORD = Path(__file__).parents[2] / "docs" / "compiled_blocks.json"

SHAPE = PackedShape(tokens=96, rows=4, longest=31)

KERNEL = re.compile(r"^ +(?:buf\d+ = )?(?:extern_kernels\.|torch\.ops\.|cpp_fused_)", re.MULTILINE)
"""A line of the compiler's code that starts a kernel."""


def fused(served: ServedModel, files: Path) -> PackedBackbone:
    """Return the packed backbone with its compiled twin, as the server makes them."""
    runner = served.runner
    twin, packed = twin_of(runner.loaded.backbone), pack_backbone(runner.loaded.backbone, runner.params)
    with compiler_files_in(files):
        packed.fused = fuse(twin, runner.params)
    return packed


def compute(packed: PackedBackbone) -> None:
    """Compute a batch."""
    with torch.inference_mode():
        inputs = PackedInputs.of_buffer(SHAPE, torch.zeros(SHAPE.nbytes, dtype=torch.uint8))
        inputs.begins[:] = torch.tensor([0, 31, 50, 70, SHAPE.tokens])
        packed.compute(inputs)


class EagerKernels(TorchDispatchMode):
    """Counts the operators within blocks that write a result: what is no view takes a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.depth = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.depth and not function.is_view and "empty" not in function.name():
            self.count += 1
        return function(*args, **(kwargs or {}))


def eager_kernels(packed: PackedBackbone) -> int:
    """Return the number of kernels of all blocks."""
    counted = EagerKernels()

    def count(by: int) -> Callable[..., None]:
        def change(*_: Any) -> None:
            counted.depth += by

        return change

    for module in packed.backbone.model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.register_forward_pre_hook(count(1))
            module.register_forward_hook(count(-1))
    with counted:
        compute(packed)
    return counted.count


def compiled_kernels(packed: PackedBackbone) -> int:
    """Return the number of kernels of all blocks, from the code that the compiler has written for each."""
    called: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "call" and "torchinductor" in frame.f_code.co_filename:
            called.append(frame.f_code.co_filename)

    assert packed.fused is not None
    sys.setprofile(note)
    try:
        compute(packed.fused)
    finally:
        sys.setprofile(None)
    return sum(len(KERNEL.findall(Path(path).read_text().partition("def call(")[2])) for path in called)


def kernels(packed: PackedBackbone) -> dict[str, int]:
    """Return both numbers."""
    return {"compiled": compiled_kernels(packed), "eager": eager_kernels(packed)}


def record() -> None:
    """Write the record."""
    from tests.runner.test_varlen import PACKED

    document = {}
    with tempfile.TemporaryDirectory() as temporary, keeping_in(Path(temporary) / "kept"):
        for name in PACKED:
            served = ServedModel(write_family(Path(temporary) / name, name))
            document[name] = kernels(fused(served, Path(temporary) / f"{name}-compiled"))
            torch.compiler.reset()
    RECORD.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    record()
