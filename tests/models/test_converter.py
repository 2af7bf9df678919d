"""A model is converted in a process that ends: what it says, and what its death or that of its parent leaves behind."""

import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.models.model_families import load, write_family
from trio_pool_serve.config import Config, ModelConfig, ProcessesConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.conversion_process import load_to_convert
from trio_pool_serve.models.loading.converter import ChildConverter, ConversionJob
from trio_pool_serve.models.loading.openvino_loading import CpuModel
from trio_pool_serve.models.loading.runner_loader import load_by_torch
from trio_pool_serve.service import Service
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Batch, Embed, PoolingRequest, RenderedPrompt, RunnerParams

pytest.importorskip("openvino")

EXACTLY = {"dtype": "float32", "cache_dir": ""}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_family(tmp_path / "bert", "bert")


@pytest.fixture
def child(model: Path) -> Iterator[ChildConverter]:
    with closing(ChildConverter(job_of(model))) as child:
        yield child


def job_of(model: Path, **changes: Any) -> ConversionJob:
    kind = read_model_folder(model).kind
    facts = {"imports": [kind.read.__module__], "kind": kind.load, "may_time": False} | changes
    return ConversionJob(str(model), ModelConfig(device="cpu", **EXACTLY), **facts)


def spoil(model: Path) -> None:
    """Make a weight NaN."""
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-4:] = np.float32("nan").tobytes()
    path.write_bytes(content)


def test_a_model_converted_in_a_process_gives_what_torch_gives(model: Path):
    config = ModelConfig(device="cpu", backend="openvino", **EXACTLY)
    processes = []

    def make(job: ConversionJob) -> ChildConverter:
        child = ChildConverter.loaded(job)
        processes.append(child._process.process)
        return child

    runner = CpuModel(read_model_folder(model), config, Offload(), load_by_torch, make).open()(RunnerParams())
    assert processes[0].returncode is not None, "its memory is returned"
    batch = Batch((PoolingRequest(RenderedPrompt(np.array([7, 8, 9], np.int32)), (Embed(),)),))
    ((ours,),), ((expected,),) = runner.launch(batch).rows, load(model, **EXACTLY).launch(batch).rows
    assert np.allclose(ours, expected, atol=3e-5)
    assert str(runner.facts).endswith("by OpenVINO")


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Write a module that processes can import which are started later; return its name."""

    def write(*lines: str) -> str:
        (tmp_path / "plugin_of_a_test.py").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(tmp_path)  # children import from where this process does
        return "plugin_of_a_test"

    return write


@pytest.mark.slow
def test_what_the_process_logs_is_logged_here(
    model: Path, plugin: Callable[..., str], caplog: pytest.LogCaptureFixture
):
    kind = job_of(model).imports[0]
    name = plugin(f"import {kind}", "import logging", "logging.getLogger('another').warning('%d lines', 2)")
    with closing(ChildConverter(job_of(model, imports=[name]))) as child:
        child.load()
    lines_here = [(record.name, record.levelno, record.getMessage()) for record in caplog.records]
    assert ("another", logging.WARNING, "2 lines") in lines_here


@pytest.mark.slow
def test_an_unexpected_error_fails_only_the_model_that_has_it(
    model: Path, plugin: Callable[..., str], caplog: pytest.LogCaptureFixture
):
    name = plugin("raise LookupError('no such thing\\nand much more')")
    jobs = job_of(model), job_of(model, imports=[name])
    with closing(ChildConverter(jobs[0])) as good, closing(ChildConverter(jobs[1])) as bad:
        with pytest.raises(ModelLoadError, match=r"^The model cannot be loaded: LookupError: no such thing$"):
            bad.load()
        assert "plugin_of_a_test.py" in caplog.text, "the traceback is logged"
        bad.close()
        process = good._process
        good.load()
        assert good._process is process


@pytest.mark.slow
def test_a_model_is_loaded_again_if_the_process_has_died_of_another(
    model: Path, plugin: Callable[..., str], tmp_path: Path
):
    (tmp_path / "made").mkdir()
    name = plugin("import os, signal", "os.kill(os.getpid(), signal.SIGKILL)")
    jobs = job_of(model), job_of(model, imports=[name])
    with closing(ChildConverter(jobs[0])) as good, closing(ChildConverter(jobs[1])) as bad:
        good.load()
        process = good._process
        with pytest.raises(ModelLoadError, match=r"The process that converts the model was ended by signal 9\."):
            bad.load()
        bad.close()
        assert good.convert(tmp_path / "made").check is not None
        assert good._process is not process
        assert process.channel.fileno() == -1, "nothing is left of the first one"


def test_a_model_of_a_kind_that_the_process_does_not_know_is_not_converted_as_another(model: Path):
    job = job_of(model, imports=["json"], kind="plugin:load")
    with pytest.raises(ModelLoadError, match=r"recognises it as .*embedding.*, not plugin:load.* json is imported"):
        load_to_convert(job)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["while it loads", "before it converts", "while it converts"])
def test_a_process_that_is_killed_is_an_error(when: str, model: Path, child: ChildConverter, tmp_path: Path):
    (tmp_path / "made").mkdir()
    if when != "while it loads":
        child.load()
    killed = Thread(target=child._process.process.kill)
    child._process.process.send_signal(signal.SIGSTOP)
    killed.start()
    if when == "before it converts":
        killed.join()
        child._process.process.wait()
    with pytest.raises(ModelLoadError, match=r"The process that converts the model was ended by signal 9\."):
        child.load() if when == "while it loads" else child.convert(tmp_path / "made")
    killed.join()
    assert list((tmp_path / "made").iterdir()) == []


@pytest.mark.slow
def test_torch_computes_a_model_whose_conversion_crashes(model: Path, plugin: Callable[..., str]):
    preparation = "from trio_pool_serve.runner.openvino.preparation import Preparation"
    name = plugin(
        f"import os, signal; {preparation}", "Preparation.convert = lambda *_: os.kill(os.getpid(), signal.SIGFPE)"
    )

    def crashing(job: ConversionJob) -> ChildConverter:
        return ChildConverter.loaded(msgspec.structs.replace(job, imports=[*job.imports, name]))

    def load_with(backend: str) -> Any:
        config = ModelConfig(device="cpu", backend=backend, **EXACTLY)
        return CpuModel(read_model_folder(model), config, Offload(), load_by_torch, crashing).open()(RunnerParams())

    assert "The process that converts the model was ended by signal 8" in str(load_with("auto").facts)
    with pytest.raises(ModelLoadError, match=r"--backend openvino: .* was ended by signal 8"):
        load_with("openvino")


PARENT = """
import sys
from pathlib import Path
from tests.models.test_converter import job_of
from trio_pool_serve.models.loading.converter import ChildConverter
child = ChildConverter(job_of(Path(sys.argv[1])))
if sys.argv[3] == "converting":
    child.load()
    print(child._process.process.pid, flush=True)
    while True:
        child.convert(Path(sys.argv[2]))
print(child._process.process.pid, flush=True)
child.load()
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["loading", "converting"])
def test_a_parent_that_is_killed_leaves_no_process_behind(what: str, model: Path, tmp_path: Path):
    (tmp_path / "made").mkdir()
    command = [sys.executable, "-c", PARENT, str(model), str(tmp_path / "made"), what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    try:
        assert select.select([child], [], [], 60)[0], "it still runs"
    finally:
        os.close(child)


@pytest.mark.slow
async def test_a_later_model_s_error_is_found_before_the_first_is_converted(model: Path, tmp_path: Path):
    broken = write_family(tmp_path / "broken", "bert")
    spoil(broken)
    cache = tmp_path / "cache"
    loading = ModelConfig(device="cpu", backend="openvino", dtype="float32", cache_dir=str(cache))
    config = Config(
        models=(f"good={model}", f"broken={broken}"), loading=loading, processes=ProcessesConfig(engine="local")
    )
    with pytest.raises(ModelLoadError, match=r"pooler\.dense\.weight in .* contains infinities or NaN"):
        await Service(config).run()
    assert list(cache.rglob("model.xml")) == []
