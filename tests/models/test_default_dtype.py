"""While transformers loads a model it sets torch's default dtype for the whole process; others compute on meanwhile."""

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trio_pool_serve
from tests.lanes import sampled
from tests.models.model_families import load
from tests.models.test_openvino_agreement import FOLDERS, IN_THE_NORMAL_RUN
from tests.models.vision_families import DUAL_ENCODERS, PAGE_RETRIEVERS, VISION_LANGUAGE
from trio_pool_serve.types import (
    Batch,
    Classify,
    Embed,
    PoolingRequest,
    RenderedPrompt,
    SparseEmbed,
    SparseVector,
    TokenClassify,
    TokenEmbed,
)

OF_IMAGES = {
    "siglip": DUAL_ENCODERS["siglip"],
    "qwen3_vl": VISION_LANGUAGE["qwen3_vl"],
    "colqwen2": PAGE_RETRIEVERS["colqwen2"],
}
IN_FLOAT = frozenset({"empty", "zeros", "ones", "full", "tensor", "rand", "randn", "linspace", "eye", "Linear"})
"""Functions and classes of torch whose result has the default dtype unless they are told another."""


def test_each_tensor_that_the_package_makes_has_a_dtype_of_its_own():
    without = []
    for path in sorted(Path(trio_pool_serve.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch" | "nn"), attr=name)) if name in IN_FLOAT:
                    if "dtype" not in [keyword.arg for keyword in node.keywords]:
                        without.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    assert without == []


@sampled(
    ("name", "backend"),
    [
        *((name, "torch") for name in (*sorted(IN_THE_NORMAL_RUN), *OF_IMAGES)),
        *((name, "openvino") for name in sorted(IN_THE_NORMAL_RUN)),
    ],
    keep=[*((name, "torch") for name in (*IN_THE_NORMAL_RUN, *OF_IMAGES)), ("embedder-bert", "openvino")],
)
def test_no_bit_of_an_output_depends_on_the_default_dtype(name: str, backend: Any, tmp_path: Path):
    if backend == "openvino":
        pytest.importorskip("openvino")
    folder = (OF_IMAGES.get(name) or FOLDERS[name])(tmp_path / "model")
    runner = load(folder, backend=backend, cache_dir="")
    rows = [RenderedPrompt(np.arange(1, 1 + length, dtype=np.int32)) for length in (12, 5)]
    kinds = {Embed, TokenEmbed, SparseEmbed, Classify, TokenClassify} & getattr(runner, "loaded", runner).heads.keys()
    batch = Batch(tuple(PoolingRequest(row, (kind(),)) for kind in kinds for row in rows))

    def outputs() -> list[bytes]:
        values = [value for row in runner.launch(batch).__await__() for value in row]  # type: ignore[misc]
        return [(value.values if isinstance(value, SparseVector) else value).tobytes() for value in values]

    expected = outputs()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert outputs() == expected
    finally:
        torch.set_default_dtype(torch.float32)
