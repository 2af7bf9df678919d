"""A model's files may be overwritten at any time: none is mapped, and none is loaded under another's fingerprint."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import modeling_utils

from tests.cpu_backend import BY_TORCH
from tests.models.adapter_folders import write_adapted
from tests.models.model_families import dense, edit_weights, layer_norm, load, pooling, write_family
from tests.models.retrieval_families import colbert_v2, csr, inference_free, write_bge_m3
from tests.models.static_families import potion, static
from tests.models.test_exported_files import ONNX, OPENVINO, export
from tests.models.test_quantized_checkpoints import by_row, quantise
from tests.models.vision_families import clip
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.conversion_process import load_to_convert
from trio_pool_serve.models.loading.openvino_loading import CpuModel
from trio_pool_serve.models.loading.runner_loader import load_by_torch, load_transformer
from trio_pool_serve.runner.openvino.converted_model import GRAPH
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import RunnerParams


def mapped_from(folder: Path) -> set[str]:
    """Return the files of a folder that this process has mapped."""
    maps = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return {fields[5] for fields in maps if len(fields) == 6 and fields[5].startswith(f"{folder.resolve()}/")}


def bert(folder: Path) -> Path:
    return write_family(folder, "bert")


def pickled(folder: Path) -> Path:
    file = bert(folder) / "model.safetensors"
    torch.save(load_file(file), folder / "pytorch_model.bin")
    file.unlink()
    return folder


def clip_in_bfloat16(folder: Path) -> Path:
    file = clip(folder) / "model.safetensors"
    save_file({name: weight.bfloat16() for name, weight in load_file(file).items()}, file, {"format": "pt"})
    return folder


def with_modules(folder: Path) -> Path:
    return write_family(folder, "bert", modules=[pooling("mean"), dense(), layer_norm()])


def fp8(folder: Path) -> Path:
    plain = write_family(folder.with_name("plain"), "bert")
    path = write_family(folder, "bert")
    quantise(path, plain, "weight_scale_inv", by_row)
    return path


def exported(file: str, folder: Path) -> Path:
    export(write_family(folder, "bert"), file)
    (folder / "model.safetensors").unlink()
    return folder


CHANGED = "The weights in .* changed while they were loaded"
IN_OPENVINO = {"backend": "openvino"}


@pytest.mark.parametrize(
    ("write", "settings"),
    [
        (bert, {}), (pickled, {}), (clip_in_bfloat16, {"dtype": "bfloat16"}), (with_modules, {}), (write_bge_m3, {}),
        (colbert_v2, {}), (inference_free, {}), (csr, {}), (static, {}), (potion, {}),
        (partial(write_adapted, name="bert"), {}),
        (bert, IN_OPENVINO), (partial(exported, OPENVINO), IN_OPENVINO), (partial(exported, ONNX), IN_OPENVINO),
    ],
)  # fmt: skip
def test_no_file_of_a_model_is_mapped_once_it_is_loaded(
    write: Callable[[Path], Path], settings: dict[str, Any], tmp_path: Path
):
    """Whichever library computes, and whatever the weights are stored in."""
    runner = load(write(tmp_path / "model"), **{"cache_dir": str(tmp_path / "cache"), "dtype": "float32"} | settings)
    assert runner.facts.computed_by.fingerprint
    assert mapped_from(tmp_path / "model") == set()


def replace_weights(folder: Path) -> None:
    """Overwrite a model's file, at the same length."""
    edit_weights(
        folder / "model.safetensors", lambda weights: weights.update({name: 2 * w for name, w in weights.items()})
    )


@pytest.mark.parametrize("write", [bert, static])
def test_weights_that_are_replaced_after_the_folder_was_read_are_refused(write: Callable[[Path], Path], tmp_path: Path):
    """Each of them would be computed under the fingerprint of the other."""
    path, config = write(tmp_path / "model"), ModelConfig(device="cpu", cache_dir="", **BY_TORCH)
    folder = read_model_folder(path, config)
    replace_weights(path)
    with pytest.raises(ModelLoadError, match=CHANGED):
        load_transformer(folder, config, Offload())(RunnerParams())


def test_weights_that_are_replaced_once_they_were_loaded_are_not_those_of_the_fingerprint(tmp_path: Path):
    """The fingerprint is computed last."""
    path, config = bert(tmp_path / "model"), ModelConfig(device="cpu", cache_dir="", **BY_TORCH)
    prepare = load_transformer(read_model_folder(path, config), config, Offload())
    replace_weights(path)
    with pytest.raises(ModelLoadError, match=CHANGED):
        prepare(RunnerParams())


def test_a_file_that_is_cut_short_while_it_is_loaded_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is the error of this model, not the end of the process."""
    file, tensors = bert(tmp_path / "model") / "model.safetensors", modeling_utils.safe_open

    def opened(*args: Any, **options: Any) -> Any:
        reader = tensors(*args, **options)
        with file.open("r+b") as overwritten:
            overwritten.truncate(4096)
        return reader

    monkeypatch.setattr(modeling_utils, "safe_open", opened)
    with pytest.raises(ModelLoadError, match="transformers cannot load"):
        load(file.parent)


def test_a_conversion_of_other_weights_than_those_of_its_key_is_not_kept(tmp_path: Path):
    """The cache would give it to each later start with the first weights."""
    path, cache = bert(tmp_path / "model"), tmp_path / "cache"
    config = ModelConfig(device="cpu", cache_dir=str(cache), dtype="float32", backend="openvino")

    def replace_and_load(job: Any) -> Any:
        replace_weights(path)
        return load_to_convert(job)

    prepare = CpuModel(read_model_folder(path), config, Offload(), load_by_torch, replace_and_load).open()
    with pytest.raises(ModelLoadError, match=CHANGED):
        prepare(RunnerParams())
    assert not [*cache.glob(f"*/{GRAPH}")]


def test_an_exported_file_that_is_replaced_while_it_is_converted_is_refused(tmp_path: Path):
    """It is the same if only OpenVINO reads the weights."""
    path = exported(OPENVINO, tmp_path / "model")
    config = ModelConfig(device="cpu", cache_dir="", dtype="float32", backend="openvino")
    prepare = load_transformer(read_model_folder(path, config), config, Offload())
    weights = (path / OPENVINO).with_suffix(".bin")
    weights.write_bytes(weights.read_bytes()[::-1])
    with pytest.raises(ModelLoadError, match=CHANGED):
        prepare(RunnerParams())
