"""Where models compute if the settings leave it open."""

from threading import Event

import pytest

from tests.models.vision_families import clip
from trio_pool_serve import process_setup
from trio_pool_serve.config import Config, ModelConfig, ProcessesConfig
from trio_pool_serve.process_setup import with_engine_placement


@pytest.mark.parametrize(
    ("processes", "cores", "expected"),
    [
        (ProcessesConfig(), 1, "local"),
        (ProcessesConfig(), 2, "local"),
        (ProcessesConfig(api_workers=2), 1, "process"),
        (ProcessesConfig(engine="local"), 8, "local"),
        (ProcessesConfig(engine="process"), 1, "process"),
    ],
)
async def test_the_default_engine_depends_on_the_cores_and_the_api_workers(scripted_folder, processes, cores, expected):
    loading = ModelConfig(device="cpu")
    placed = await with_engine_placement(
        Config(models=(str(scripted_folder),), loading=loading, processes=processes), cores
    )
    assert placed.processes.engine == expected
    assert placed.processes.api_workers == processes.api_workers


async def test_a_model_that_reads_images_is_given_processes(tmp_path):
    config = Config(models=(str(clip(tmp_path)),), loading=ModelConfig(device="cpu"))
    assert (await with_engine_placement(config, cores=2)).processes.engine == "process"


async def test_a_model_whose_files_cannot_be_read_in_time_counts_as_one_of_texts(tmp_path, autojump_clock, monkeypatch):
    go_on = Event()
    monkeypatch.setattr(process_setup, "accepts_images", lambda *_: go_on.wait(60))
    config = Config(models=(str(tmp_path),), loading=ModelConfig(device="cpu"))
    assert (await with_engine_placement(config, cores=2)).processes.engine == "local"
    go_on.set()
