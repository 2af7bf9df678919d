"""Servers that several files share."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.model_folders import write_scripted_folder

if TYPE_CHECKING:
    from tests.compatibility.tei_servers import Servers


@pytest.fixture(scope="package")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Servers"]:
    """A server of each kind of model that text-embeddings-inference serves."""
    from tests.compatibility.tei_servers import serving_each, write_folders  # they import torch

    root = tmp_path_factory.mktemp("models")
    with serving_each(write_folders(root), write_scripted_folder(root / "scripted")) as served:
        yield served
