"""A compiled model gives what it gives uncompiled, without compiling again while it serves."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import trio

from tests.models.model_families import TEXTS, ServedModel, largest_difference, load, write_family
from tests.models.vision_families import write_clip
from trio_pool_serve.errors import ModelLoadError

TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def _stance() -> Iterator[None]:
    yield
    torch.compiler.set_stance("default")
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own code
@pytest.mark.parametrize("name", ["modernbert", "qwen3"])
async def test_a_compiled_family_agrees_in_any_thread(tmp_path: Path, name: str):
    path = write_family(tmp_path / name, name)
    expected = await ServedModel(path).embed(TEXTS)
    served = ServedModel(path, settings={"backend": "compile"})
    assert served.runner.describe().endswith("compiled")
    torch.compiler.set_stance("fail_on_recompile")

    def embed_together_and_alone() -> tuple[list, list]:
        together = trio.run(served.embed, TEXTS)
        return together, [trio.run(served.embed, [text])[0] for text in TEXTS]

    for rows in await trio.to_thread.run_sync(embed_together_and_alone):
        assert largest_difference(rows, expected) < TOLERANCE


def test_a_model_that_sees_is_not_compiled(tmp_path: Path):
    with pytest.raises(ModelLoadError, match="--backend compile: models that read images"):
        load(write_clip(tmp_path / "clip"), backend="compile")
