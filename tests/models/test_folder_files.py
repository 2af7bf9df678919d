"""Only regular files of a model's folder are opened."""

import os
from pathlib import Path

import pytest
import trio

from tests.model_folders import write_json, write_scripted_folder
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files import folder_files
from trio_pool_serve.models.files.chat_settings import given_chat_template
from trio_pool_serve.models.folder import read_model_folder

pytestmark = pytest.mark.unit


async def read(folder: Path, **options: str) -> None:
    """Read a folder in a thread, and fail if that waits."""
    with trio.fail_after(10):
        await trio.to_thread.run_sync(read_model_folder, folder, ModelConfig(**options), abandon_on_cancel=True)


@pytest.mark.parametrize(
    "name", ["config.json", "modules.json", "tokenizer.json", "chat_template.jinja", "model.safetensors", "1_Dense/x"]
)
async def test_a_fifo_is_refused_at_once_by_name(tmp_path: Path, name: str):
    folder = write_scripted_folder(tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    (folder / name).parent.mkdir(exist_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ModelLoadError, match=f"{name} is neither a file nor a folder"):
        await read(folder)


async def test_a_fifo_among_a_module_s_files_is_refused_however_far_down(tmp_path: Path):
    folder = write_scripted_folder(tmp_path / "model")
    write_json(
        folder / "modules.json",
        [
            {"type": "sentence_transformers.models.Transformer", "path": ""},
            {"type": "sentence_transformers.models.Pooling", "path": "a/b"},
        ],
    )
    (folder / "a/b").mkdir(parents=True)
    os.mkfifo(folder / "a/b/shard.safetensors")
    with pytest.raises(ModelLoadError, match=r"shard\.safetensors is neither a file nor a folder"):
        await read(folder)


def test_a_fifo_as_chat_template_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "template")
    with pytest.raises(ModelLoadError, match="is neither a template nor a file: it is not a regular file"):
        given_chat_template(str(tmp_path / "template"))


def test_links_and_hidden_files_are_let_be(tmp_path: Path):
    blobs = write_scripted_folder(tmp_path / "blobs")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / ".git").mkdir()
    os.mkfifo(folder / ".git/ipc")
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    assert read_model_folder(folder).max_model_len == 64


def test_a_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_scripted_folder(tmp_path / "model")
    monkeypatch.setattr(folder_files, "MAX_FILE_BYTES", 20)
    with pytest.raises(ModelLoadError, match=r"/config\.json cannot be read: it exceeds 20 bytes"):
        read_model_folder(folder)
