"""Where models will compute, decided from settings, files and the environment."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trio_pool_serve.config import Config, ModelConfig, ProcessesConfig, decode_config, encode_config
from trio_pool_serve.engine.process_placement import default_placement, has_gpu, replicas_of, with_replicas

CUDA_BUILD = "__version__ = '2.8.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
CPU_BUILD = "__version__ = '2.8.0+cpu'\ndebug = False\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
OLDER_CPU_BUILD = "__version__ = '1.13.1'\ncuda = None\n"


@pytest.fixture
def finds_gpu(tmp_path: Path) -> Callable[..., bool]:
    """Look for a GPU on a machine: a tree with the driver's device file, and a build of torch to be imported."""

    def find(
        device: str = "auto", *, driver: bool = True, version: str | None = CUDA_BUILD, **environment: str
    ) -> bool:
        torch = tmp_path / "site-packages" / "torch"
        if version is not None:
            torch.mkdir(parents=True)
            (torch / "__init__.py").write_text("raise RuntimeError('torch is imported')")
            (torch / "version.py").write_text(version)
        if driver:
            (tmp_path / "nvidiactl").touch()
        return has_gpu(
            ModelConfig(device=device),
            driver=tmp_path / "nvidiactl",
            environment=environment,
            import_path=[str(torch.parent)],
        )

    return find


@pytest.mark.parametrize(
    ("made", "device", "has"),
    [
        ({}, "auto", True),
        ({}, "cpu", False),
        ({"driver": False}, "auto", False),
        ({"version": CPU_BUILD}, "auto", False),
        ({"version": OLDER_CPU_BUILD}, "auto", False),
        ({"version": None}, "auto", False),
        ({"version": "__version__ = '2.8.0'\n"}, "auto", True),  # does not state its build
    ],
    ids=str,
)
def test_a_gpu_needs_the_driver_and_a_torch_for_cuda(finds_gpu, made, device, has):
    assert finds_gpu(device, **made) == has


VISIBLE, HIDDEN = ("0", "1,0", " 2", "0,-1", "GPU-8932f937", "MIG-12ab/1/0"), ("", " ", "-1", "-1,0", "NoDevFiles")


@pytest.mark.parametrize("visible", [*VISIBLE, *HIDDEN])
def test_a_gpu_must_be_visible(finds_gpu, visible):
    assert finds_gpu(CUDA_VISIBLE_DEVICES=visible) == (visible in VISIBLE)


def test_a_device_that_is_named_is_taken_at_its_word(finds_gpu):
    """The engine process says what is wrong with it."""
    assert finds_gpu("cuda:1", driver=False, version=CPU_BUILD, CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize(
    ("settings", "placement"),
    [
        ({}, "local"),
        ({"api_workers": 2}, "process"),
        ({"cores": 1, "reads_images": True}, "local"),
        ({"reads_images": True}, "process"),
        ({"backend": "torch"}, "process"),
        ({"backend": "torch", "cores": 1}, "local"),
        ({"dtype": "float16"}, "local"),
        ({"backend": "compile"}, "process"),
        ({"device": "cuda"}, "process"),
        ({"device": "cuda", "by_numpy": True}, "local"),
        ({"by_numpy": True, "api_workers": 2}, "process"),
    ],
    ids=str,
)
def test_models_compute_in_the_process_that_answers_where_openvino_computes_them(settings, placement):
    settings = {"cores": 2, "reads_images": False, "by_numpy": False, "api_workers": 1, "device": "cpu"} | settings
    options = {name: settings.pop(name) for name in ("cores", "reads_images", "by_numpy")}
    workers = settings.pop("api_workers")
    config = Config(models=("m",), loading=ModelConfig(**settings), processes=ProcessesConfig(api_workers=workers))
    assert default_placement(config, **options) == placement


def test_without_openvino_models_compute_in_processes_of_their_own(monkeypatch):
    monkeypatch.setattr("trio_pool_serve.engine.process_placement.find_spec", lambda name: None)
    config = Config(models=("m",), loading=ModelConfig(device="cpu"))
    assert default_placement(config, reads_images=False, cores=2) == "process"


CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("device", "settings", "gpus", "replicas"),
    [
        ("cuda", {}, 8, 8),
        ("cuda", {"replicas": "2/gpu"}, 8, 16),
        ("cuda", {"replicas": 3}, 8, 3),
        ("cuda", {}, 1, 1),
        ("cuda", {}, 0, 1),  # none is known where only torch can tell which there are
        ("cuda", {"replicas": "2/gpu"}, 0, 2),
        ("cpu", {}, 40, min(4, CORES)),
        ("cpu", {"replicas": 3}, 40, 3),
    ],
    ids=str,
)
def test_each_gpu_or_core_gets_so_many_replicas_unless_their_number_is_given(device, settings, gpus, replicas):
    config = Config(models=("m",), loading=ModelConfig(device=device), processes=ProcessesConfig(**settings))
    placed = with_replicas(config, gpus)
    assert placed.processes.replicas == replicas_of(placed) == replicas
    assert decode_config(encode_config(placed)) == placed
