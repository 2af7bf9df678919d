"""Weights in pickles: tensors are read, and no code in them runs."""

import ast
import pickle
from pathlib import Path

import pytest
import torch

import trio_pool_serve
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.loading.checkpoint import read_weights

SOURCES = sorted(Path(trio_pool_serve.__file__).parent.rglob("*.py"))


class Touch:
    """What a hostile file would have the unpickler do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_a_pickle_that_calls_something_is_refused(tmp_path, save):
    save({"head.weight": Touch(tmp_path / "touched")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError):
        read_weights(tmp_path, "head.")
    assert not (tmp_path / "touched").exists()


def test_nothing_in_the_package_unpickles_without_restriction():
    calls = [
        (path, node)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    loads = [(path, call) for path, call in calls if ast.unparse(call.func) in ("torch.load", "pickle.load", "np.load")]
    assert len(loads) >= 2
    restrictions = ("weights_only=True", "allow_pickle=False")
    assert not [path for path, call in loads if not any(word in ast.unparse(call) for word in restrictions)]
    assert not [path for path, call in calls if ast.unparse(call.func) in ("pickle.loads", "torch.jit.load", "eval")]
