"""What a model's digests depend on."""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.model_digest import digest_of, file_states, fingerprint_of_loaded

pytestmark = pytest.mark.unit

LAYER_BYTES = 2**20
LAYERS = 40
"""Many more than pieces of a file that a look at some of them would read."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    files = {
        "config.json": b"{}", "1_Pooling/config.json": b"{}", "modeling.py": b"", "vocab.txt": b"a\nb",
        "model.safetensors": bytes(LAYERS * LAYER_BYTES), "model.safetensors.index.json": b"{}",
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(params=[True, False], ids=["remembering", "reading"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> ModelConfig:
    return ModelConfig(cache_dir=str(tmp_path / "cache") if request.param else "")


def change(path: Path, at: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\1")


def test_moved_copied_and_linked_folders_have_the_same_digest(folder: Path, config: ModelConfig, tmp_path: Path):
    first = digest_of(folder, config)
    shutil.copytree(folder, tmp_path / "copied", copy_function=shutil.copyfile)
    moved = folder.rename(tmp_path / "moved")
    blobs = tmp_path / "blobs"
    snapshot = tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    for number, path in enumerate(sorted(path for path in moved.rglob("*") if path.is_file())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.relative_to(moved)).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / path.relative_to(moved)).symlink_to(blobs / str(number))
    assert {digest_of(path, config) for path in (moved, tmp_path / "copied", snapshot)} == {first}


def test_any_layer_and_any_small_file_changes_the_digest(folder: Path, config: ModelConfig):
    seen = [digest_of(folder, config)]
    for layer in range(0, LAYERS, 3):
        change(folder / "model.safetensors", layer * LAYER_BYTES + 12_345)
        seen.append(digest_of(folder, config))
    for name in ("config.json", "1_Pooling/config.json", "modeling.py", "vocab.txt", "model.safetensors.index.json"):
        change(folder / name)
        seen.append(digest_of(folder, config))
    (folder / "vocab.txt").rename(folder / "words.txt")
    seen.append(digest_of(folder, config))
    (folder / "words.txt").unlink()
    seen.append(digest_of(folder, config))
    assert len({*seen}) == len(seen)


def test_files_that_change_nothing_that_is_computed_do_not_count(folder: Path, config: ModelConfig):
    first = digest_of(folder, config)
    for name in ("README.md", "plot.png", "onnx/model.bin", "openvino/model.bin", ".git/config.json", ".x.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"new")
    assert digest_of(folder, config) == first


def test_machines_compare_files_weights_and_settings(folder: Path, tmp_path: Path):
    config = ModelConfig(cache_dir=str(tmp_path / "cache"))
    first = digest_of(folder, config)
    assert digest_of(folder, ModelConfig(cache_dir="")) == first
    assert digest_of(folder, ModelConfig(cache_dir="", pooling="cls")).agrees_with(first) is False
    change(folder / "model.safetensors", 7 * LAYER_BYTES)
    other = digest_of(folder, config)
    assert (other.files, other.agrees_with(first)) == (first.files, False)
    for path in folder.glob("model.safetensors*"):
        path.unlink()
    without = digest_of(folder, config)
    assert (without.weights, without.agrees_with(first)) == ("", True)
    change(folder / "config.json")
    assert not digest_of(folder, config).agrees_with(first)


def test_the_fingerprint_is_that_of_content_settings_dtype_and_backend(folder: Path, tmp_path: Path):
    config, exported = ModelConfig(cache_dir=str(tmp_path / "cache")), tmp_path / "model.xml"
    exported.write_bytes(b"<net/>")
    changed = shutil.copytree(folder, tmp_path / "changed")
    change(changed / "model.safetensors", 7 * LAYER_BYTES)
    copied = shutil.copytree(folder, tmp_path / "elsewhere" / "copied", copy_function=shutil.copyfile)

    def fingerprint(folder: Path, config: ModelConfig, exported: Sequence[Path], *computed_by: str) -> str:
        as_read = file_states(folder, exported)
        return fingerprint_of_loaded(folder, config, exported, *computed_by, as_read=as_read)

    first = fingerprint(folder, config, (), "float32", "torch")
    assert re.fullmatch("[0-9a-f]{16}", first)
    same = ModelConfig(cache_dir="", dtype="float32", backend="torch", device="cpu", served_model_name="other")
    assert fingerprint(copied, same, (), "float32", "torch") == first
    others = [
        fingerprint(changed, config, (), "float32", "torch"),
        fingerprint(folder, config, [exported], "float32", "torch"),
        fingerprint(folder, ModelConfig(cache_dir="", pooling="cls"), (), "float32", "torch"),
        fingerprint(folder, ModelConfig(cache_dir="", normalize=True), (), "float32", "torch"),
        fingerprint(folder, config, (), "bfloat16", "torch"),
        fingerprint(folder, config, (), "float32", "openvino"),
    ]
    assert len({first, *others}) == 1 + len(others)


def test_files_that_change_while_a_model_is_loaded_give_no_fingerprint(folder: Path, config: ModelConfig):
    """Weights are refused, of which a part may be new; links, copies and permissions change nothing."""
    as_read, weights = file_states(folder), folder / "model.safetensors"
    first = fingerprint_of_loaded(folder, config, (), as_read=as_read)
    os.link(weights, folder.parent / "another")
    weights.chmod(0o600)
    assert fingerprint_of_loaded(folder, config, (), as_read=as_read) == first != ""
    change(folder / "config.json")
    assert fingerprint_of_loaded(folder, config, (), as_read=as_read) == ""
    change(weights, 7 * LAYER_BYTES)
    for damage in (lambda: None, weights.unlink):
        damage()
        with pytest.raises(ModelLoadError, match=r"The weights in .* changed while they were loaded; load them"):
            fingerprint_of_loaded(folder, config, (), as_read=as_read)
