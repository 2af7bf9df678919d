"""Where a model's files are found, without a network."""

from pathlib import Path

import huggingface_hub.constants
import pytest

from tests.model_folders import write_json
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.folder import locate_model, read_model_folder

pytestmark = pytest.mark.unit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "89abcdef0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with two revisions of one model, and no network."""
    cache = tmp_path / "hub"
    repository = cache / "models--house--tiny"
    for commit, size in ((COMMIT, 30), (OLDER, 20)):
        config = {"model_type": "bert", "vocab_size": size, "max_position_embeddings": 64}
        write_json(repository / "snapshots" / commit / "config.json", config)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    (repository / "refs/v1").write_text(OLDER)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return cache


@pytest.mark.parametrize("name", ["/models", "models", "~/models", "house/tiny"])
def test_a_local_folder_goes_before_a_hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / name.removeprefix("~").removeprefix("/")
    folder.mkdir(parents=True)
    assert locate_model(str(folder) if name.startswith("/") else name).absolute() == folder


def test_a_cached_hub_model_is_found_offline():
    path = locate_model("house/tiny")
    assert path.name == COMMIT
    assert read_model_folder(path).vocab_size == 30


@pytest.mark.parametrize("revision", ["v1", OLDER])
def test_a_revision_is_a_tag_or_a_commit(revision: str):
    assert locate_model("house/tiny", ModelConfig(revision=revision)).name == OLDER


@pytest.mark.parametrize("name", ["no such model!", "/no/such/folder", "a/b/c", "./missing"])
def test_what_is_neither_a_folder_nor_an_id_is_an_error(name: str):
    with pytest.raises(ModelLoadError, match="is neither a folder nor the id of a hub model"):
        locate_model(name)


@pytest.mark.parametrize(("name", "revision"), [("house/unheard-of", None), ("house/tiny", "v9")])
def test_what_the_hub_does_not_give_is_an_error(name: str, revision: str | None):
    with pytest.raises(ModelLoadError, match=f"{name} is not a folder, and cannot be downloaded from the hub"):
        locate_model(name, ModelConfig(revision=revision))
