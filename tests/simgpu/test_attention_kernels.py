"""The fastest kernel whose package is installed computes attention, if the output agrees; the description names it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import attention
from torch.nn.attention import _registry

from tests.models.model_families import ServedModel, write_family
from tests.simgpu import sim_tensor
from tests.simgpu.serving import on_simulated_device
from trio_pool_serve.runner.cuda import packed_backbone


class Kernel:
    """A package's kernel as torch activates it: in place of the device's own, until it is removed."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.change = change
        self.calls = 0
        self.patch = pytest.MonkeyPatch()

    def __call__(self) -> "Kernel":
        own = sim_tensor.varlen_attention

        def attend(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            output, *rest = own(*args, **kwargs)
            return self.change(output), *rest

        self.patch.setattr(sim_tensor, "varlen_attention", attend)
        return self

    def remove(self) -> None:
        self.patch.undo()


@contextmanager
def installed(**kernels: Kernel) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_backbone, "_kernel", [])
        for name, kernel in kernels.items():
            patch.setitem(_registry._FLASH_ATTENTION_IMPLS, name, kernel)
        try:
            yield
        finally:
            attention.restore_flash_attention_impl(_raise_warn=False)


def loaded(tmp_path: Path) -> ServedModel:
    return ServedModel(write_family(tmp_path / "bert", "bert"), dtype="bfloat16", settings={"backend": "auto"})


def test_without_a_package_it_is_torch_s_own(tmp_path: Path):
    with on_simulated_device():
        assert "without padding, attention by FA2" in str(loaded(tmp_path).runner.facts)


@pytest.mark.parametrize("name", ["FA3", "FA4"])
def test_an_installed_kernel_that_agrees_is_used_from_then_on(tmp_path: Path, name: str):
    kernel = Kernel(lambda output: output)
    with on_simulated_device(), installed(**{name: kernel}):
        runner = loaded(tmp_path).runner
        assert f"without padding, attention by {name}" in str(runner.facts)
        assert attention.current_flash_attention_impl() == name
    assert kernel.calls


def test_a_kernel_that_differs_is_not_used(tmp_path: Path):
    wrong, right = Kernel(lambda output: output * 1.5), Kernel(lambda output: output)
    with on_simulated_device(), installed(FA3=wrong, FA4=right):
        assert "attention by FA4" in str(loaded(tmp_path).runner.facts)
    wrong.calls = 0
    with on_simulated_device(), installed(FA3=wrong):
        assert "without padding, attention by FA2" in str(loaded(tmp_path).runner.facts)
        assert attention.current_flash_attention_impl() is None
        first = wrong.calls
        assert first
        loaded(tmp_path)
        assert wrong.calls == first, "a later model has the kernel of the first"
