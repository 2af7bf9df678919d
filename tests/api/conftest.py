"""Fixtures that tests of conversations share."""

from pathlib import Path
from typing import Any

import pytest

from tests.rendering.chat.chat_folders import CHATML, write_chat_folder


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template."""
    return write_chat_folder(tmp_path_factory.mktemp("chat") / "model", CHATML)


@pytest.fixture(scope="session")
def theirs(chat_folder: Path) -> Any:
    """The same model's tokenizer, as transformers loads it."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(chat_folder)
