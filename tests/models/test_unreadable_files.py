"""Files that cannot be read: the error names the file and the system's reason, or says that it is incomplete."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.model_folders import BARE, write_json
from tests.models.model_families import refuse, write_family
from tests.server.server_process import ROOT
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.safetensors_files import read_tensors
from trio_pool_serve.models.folder import locate_model

READ = """
import sys
from pathlib import Path
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.safetensors_files import read_tensors
from trio_pool_serve.models.folder import locate_model
try:
    read_tensors(locate_model(sys.argv[1]) / "model.safetensors")
except ModelLoadError as error:
    print(error)
"""

WITHOUT_RIGHTS = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
"""root may read everything; a process without these capabilities may not."""


def cut(path: Path, kept_bytes: int) -> None:
    os.truncate(path, kept_bytes)


@pytest.mark.parametrize("kept_bytes", [0, 4, 100, 4000])
def test_half_a_download_of_safetensors_is_named(tmp_path: Path, kept_bytes: int):
    path = write_family(tmp_path / "model", "bert")
    cut(path / "model.safetensors", kept_bytes)
    said = r"model/model\.safetensors cannot be read: .* or an incomplete download\."
    refuse(path, said)
    with pytest.raises(ModelLoadError, match=said):
        read_tensors(path / "model.safetensors")


def test_half_a_download_of_a_pickle_is_named(tmp_path: Path):
    path = write_family(tmp_path / "model", "bert")
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    cut(path / "pytorch_model.bin", 4000)
    refuse(path, r"model/pytorch_model\.bin cannot be read: .* or an incomplete download\.$")


@pytest.mark.parametrize("unreadable", ["model", "model/model.safetensors"])
def test_a_folder_and_weights_without_permission_are_named(tmp_path: Path, unreadable: str):
    write_json(tmp_path / "model/config.json", BARE)
    (tmp_path / "model/model.safetensors").write_bytes(b"")
    (tmp_path / unreadable).chmod(0)
    command = [sys.executable, "-c", READ, str(tmp_path / "model")]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root may read everything, and setpriv is not installed")
        command = [*WITHOUT_RIGHTS, *command]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    (tmp_path / unreadable).chmod(0o700)
    assert said == f"{tmp_path / unreadable} cannot be read: Permission denied.\n"


def test_a_file_in_place_of_a_folder_is_an_error_that_names_the_folder(tmp_path: Path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=rf"model\.gguf is a file; .*: {tmp_path}\.$"):
        locate_model(str(tmp_path / "model.gguf"))


def test_a_home_that_nobody_has_is_no_crash():
    with pytest.raises(ModelLoadError, match="~nobody-here/model is neither a folder nor"):
        locate_model("~nobody-here/model")


def test_a_model_that_is_none_may_be_another_name_of_it():
    config = ModelConfig(served_model_name="a")
    with pytest.raises(ModelLoadError, match=r"If it is another name, write a,b c\."):
        locate_model("b c", config)
    with pytest.raises(ModelLoadError) as error:
        locate_model("./no/folder", config)
    assert "another name" not in str(error.value)
