"""Fixtures that several test files share."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.dialects.tei_models import Judging, Served, serving
from tests.api.scripted_models import Labeller
from tests.rendering.chat.chat_folders import CHATML, write_chat_folder
from trio_pool_serve.config import Config


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template."""
    return write_chat_folder(tmp_path_factory.mktemp("chat") / "model", CHATML)


@pytest.fixture(scope="session")
def theirs(chat_folder: Path) -> Any:
    """The same model's tokenizer, as transformers loads it."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(chat_folder)


@pytest.fixture
async def embedding(config: Config) -> AsyncIterator[Served]:
    async with serving(config) as served:
        yield served


@pytest.fixture
async def classifying(config: Config) -> AsyncIterator[Served]:
    async with serving(config, Labeller(labels=("short", "heavy"))) as served:
        yield served


@pytest.fixture
async def judging(config: Config) -> AsyncIterator[Served]:
    async with serving(config, Judging(), labels=1) as served:
        yield served
