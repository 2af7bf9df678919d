"""OpenVINO and NNCF report nothing about their use: a process that converts and quantises opens no socket."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.model_families import write_family

pytest.importorskip("openvino")

PROGRAM = """
import sys
tried = []
sys.addaudithook(lambda event, _: tried.append(event) if event.startswith("socket.") else None)
from pathlib import Path
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.conversion_process import load_to_convert
from trio_pool_serve.models.loading.openvino_loading import CpuModel
from trio_pool_serve.models.loading.runner_loader import load_by_torch
from trio_pool_serve.types import RunnerParams
from trio_pool_serve.runner.openvino import preparation
from trio_pool_serve.threads.offload import Offload

preparation.MIN_INT8_COSINE = -1  # random weights
config = ModelConfig(device="cpu", cache_dir="", **dict(option.split("=") for option in sys.argv[2:]))
prepare = CpuModel(read_model_folder(Path(sys.argv[1])), config, Offload(), load_by_torch, load_to_convert).open()
print(prepare(RunnerParams()).facts)
assert "openvino_telemetry.main" not in sys.modules
assert not tried, tried
"""


@pytest.mark.slow
@pytest.mark.parametrize("option", ["backend=openvino", "dtype=int8"])
def test_nothing_is_reported(option: str, tmp_path: Path):
    if option == "dtype=int8":
        pytest.importorskip("nncf")
    home = tmp_path / "home"
    home.mkdir()
    model = write_family(tmp_path / "bert", "bert")
    variables = {name: value for name, value in os.environ.items() if name not in ("CI", "TF_BUILD", "JENKINS_URL")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), option],
        env={**variables, "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "by OpenVINO" in done.stdout
    assert not (home / "intel").exists()
