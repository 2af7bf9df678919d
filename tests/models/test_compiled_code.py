"""A model is compiled in a process that ends, once for its architecture, and computed without until then."""

import gc
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from torch._dynamo.utils import counters

from tests.conftest import until
from tests.engine.engines import engine_over, in_thread, request, running
from tests.models.model_families import write_family
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.converter import ChildConverter, ConversionJob
from trio_pool_serve.models.loading.runner_loader import load_transformer
from trio_pool_serve.storage.model_cache import ModelCache
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Batch, PoolingRequest, Prepare, RenderedPrompt, Runner, RunnerParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("new_compiler"),
    pytest.mark.filterwarnings("ignore"),
]  # of the compiler's own code

COMPILING = "bert is being compiled by another process; until then it runs uncompiled"

ENDS = """
import atexit, sys, time, traceback
def compiles(frame):
    return any("fused_blocks" in each.f_code.co_filename for each, _ in traceback.walk_stack(frame))
# The first that is registered is called last.
atexit.register(lambda: print(*map(compiles, sys._current_frames().values())))
from trio_pool_serve.python_api import Model
model = Model(sys.argv[1], dtype="float32", backend="compile", cache_dir=sys.argv[2])
from trio_pool_serve.runner.cuda.fused_blocks import _compiling
while not _compiling.locked():
    time.sleep(0.001)
print(len(model.embed(["a text"])[0]))
"""
"""A program that ends while torch compiles in one of its threads; it prints which threads compile at the very end."""


def prepare(model: Path, cache: Path | str) -> Prepare:
    config = ModelConfig(device="cpu", dtype="float32", backend="compile", cache_dir=str(cache))
    return load_transformer(read_model_folder(model, config), config, Offload())


def vectors(runner: Runner) -> list[Any]:
    rows = (PoolingRequest(RenderedPrompt(np.arange(3, 3 + length, dtype=np.int32))) for length in (5, 17, 2))
    batch: Any = runner.launch(Batch(tuple(rows)))
    return [vector for (vector,) in batch.rows]


def improve(runner: Runner) -> None:
    (improvement,) = runner.facts.improvements
    for step in improvement():
        step()


@pytest.mark.parametrize("is_cached", [True, False])
def test_what_another_process_has_compiled_is_read(tmp_path: Path, caplog, monkeypatch, is_cached: bool):
    caplog.set_level(logging.INFO)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    model = write_family(tmp_path / "bert", "bert")
    cache = tmp_path / "cache" if is_cached else ""
    runner = prepare(model, cache)(RunnerParams())
    before = vectors(runner)
    improve(runner)
    assert caplog.messages.count(COMPILING) == 1
    assert [line for line in caplog.messages if line.startswith("compiled in ") and line.endswith(" MiB")]
    assert counters["inductor"]["fxgraph_cache_hit"] > 0
    assert counters["inductor"]["fxgraph_cache_miss"] == 0
    after = vectors(runner)
    assert max(float(np.abs(a - b).max()) for a, b in zip(before, after, strict=True)) < 1e-5
    assert [path for path in (tmp_path / "tmp").rglob("*") if path.is_file()] == []
    if is_cached:
        ended = subprocess.run([sys.executable, "-c", ENDS, str(model), str(cache)], capture_output=True, check=False)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.startswith(b"32\nFalse")
        assert b"True" not in ended.stdout
        assert [entry.about.what.startswith("compiled for ") for entry in ModelCache(tmp_path / "cache").entries()]
        caplog.clear()
        improve(prepare(model, cache)(RunnerParams()))
        assert COMPILING not in caplog.messages


@contextmanager
def noting(caplog, words: str) -> Iterator[threading.Event]:
    """Set an event once a line with these words has been logged."""
    logged = threading.Event()
    caplog.set_level(logging.INFO)
    caplog.handler.addFilter(lambda record: words not in record.getMessage() or not logged.set())
    yield logged
    assert logged.is_set()


async def test_a_freed_model_leaves_no_weights(tmp_path: Path):
    model, weights = write_family(tmp_path / "bert", "bert"), []

    def load() -> Prepare:
        prepared = prepare(model, tmp_path / "cache")

        def noted(params: RunnerParams) -> Runner:
            runner: Any = prepared(params)
            weights.extend(map(weakref.ref, runner.loaded.backbone.model.parameters()))
            return runner

        return noted

    engine = engine_over(load)
    async with running(engine):
        await engine.devices.improved.wait()
        assert engine.facts.computation[-1] == "compiled"
        assert all(weight() is not None for weight in weights)
    engine.devices.free()
    # The threads that have changed over let go of the last step a moment later.
    await until(lambda: gc.collect() >= 0 and not any(weight() is not None for weight in weights))


async def test_a_killed_compiler_fails_no_row(tmp_path: Path, caplog):
    model = write_family(tmp_path / "bert", "bert")
    with noting(caplog, COMPILING) as compiling, noting(caplog, "could not be compiled") as failed:
        async with running(engine_over(lambda: prepare(model, tmp_path / "cache"))) as engine:
            await in_thread(compiling.wait)
            before = await engine.submit(request(5))
            (*_, child) = [each for each in psutil.Process().children() if "conversion_process" in str(each.cmdline())]
            os.kill(child.pid, signal.SIGKILL)
            await in_thread(failed.wait)
            after = await engine.submit(request(5))
            assert np.array_equal(before.values[0], after.values[0])
    assert ModelCache(tmp_path / "cache").entries() == []


def test_the_environment_can_switch_it_off(tmp_path: Path, monkeypatch):
    runner = prepare(write_family(tmp_path / "bert", "bert"), tmp_path / "cache")(RunnerParams())
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(ModelLoadError, match="TORCHDYNAMO_DISABLE is set"):
        improve(runner)
    assert ModelCache(tmp_path / "cache").entries() == []


async def test_without_a_compiler_rows_are_computed_as_before(tmp_path: Path, caplog, monkeypatch):
    """So they are if another model keeps a process with a compiler: it does not write twice what it has compiled."""
    model = write_family(tmp_path / "bert", "bert")
    config = ModelConfig(device="cpu", dtype="float32", cache_dir=str(tmp_path / "cache"))
    with closing(ChildConverter.loaded(ConversionJob.of(read_model_folder(model, config), config))):
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        with noting(caplog, "could not be compiled"):
            async with running(engine_over(lambda: prepare(model, tmp_path / "cache"))) as engine:
                await engine.devices.improved.wait()
                assert len((await engine.submit(request(5))).values[0]) == 32
    assert [entry.name for entry in ModelCache(tmp_path / "cache").entries() if "compiled" in entry.name] == []
