"""Where models compute if the settings leave it open."""

from threading import Event

from attrs import evolve

from tests.model_folders import write_scripted_folder
from tests.models.vision_families import clip
from trio_pool_serve import process_setup
from trio_pool_serve.config import Config, ModelConfig, ProcessesConfig
from trio_pool_serve.process_setup import with_engine_placement


async def test_an_engine_that_is_given_is_kept_and_the_default_depends_on_the_cores_and_the_models(tmp_path):
    loading = ModelConfig(device="cpu")
    texts = Config(models=(str(write_scripted_folder(tmp_path / "texts")),), loading=loading)
    images = Config(models=(str(clip(tmp_path / "images")),), loading=loading)
    assert (await with_engine_placement(texts, cores=2)).processes.engine == "local"
    assert (await with_engine_placement(images, cores=2)).processes.engine == "process"
    assert (await with_engine_placement(images, cores=1)).processes.engine == "local"
    given = evolve(texts, processes=ProcessesConfig(engine="process"))
    assert await with_engine_placement(given, cores=1) == given


async def test_a_model_whose_files_cannot_be_read_in_time_counts_as_one_of_texts(tmp_path, autojump_clock, monkeypatch):
    go_on = Event()
    monkeypatch.setattr(process_setup, "peek_folder", lambda *_: go_on.wait(60))
    config = Config(models=(str(tmp_path),), loading=ModelConfig(device="cpu"))
    assert (await with_engine_placement(config, cores=2)).processes.engine == "local"
    go_on.set()
