"""By OpenVINO every start and every replica computes the same bits; few models in the normal run."""

import hashlib
import itertools
import multiprocessing
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import trio

from tests.lanes import sampled
from tests.models.model_families import TEXTS, ServedModel
from tests.models.test_openvino_agreement import FOLDERS, prompts_of
from trio_pool_serve.config import Dtype
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.prompts import TextPrompt
from trio_pool_serve.runner.openvino import selection
from trio_pool_serve.types import Classify, Embed, SparseEmbed, SparseVector, TokenClassify, TokenEmbed

pytest.importorskip("openvino")

DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")

IN_THE_NORMAL_RUN = {
    ("embedder-gemma3", "float32"),
    ("classifier-deberta-v2", "bfloat16"),
    ("late-interaction-pylate_modernbert", "bfloat16"),
}


async def computed(folder: Path, dtype: Dtype, cache: Path | str) -> str:
    """A digest of everything that a model gives, which is loaded for this; or why OpenVINO does not compute it."""
    try:
        served = ServedModel(folder, dtype=dtype, settings={"cpu_backend": "openvino", "cache_dir": str(cache)})
    except ModelLoadError as error:
        if "OpenVINO's output differs" not in str(error):
            raise
        return str(error)
    digest = hashlib.sha256()
    for params in (Embed(), TokenEmbed(), SparseEmbed(), Classify(), TokenClassify()):
        if type(params) in served.runner.heads:
            for prompts in [*prompts_of(served, params), [TextPrompt(TEXTS[1])]]:
                for value in await served.compute(prompts, params):
                    for array in (value.indices, value.values) if isinstance(value, SparseVector) else (value,):
                        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()


# Each kind in the types in turn; two replicas start with every kind in each type below.
@sampled(
    ("name", "dtype"),
    sorted(
        {
            *zip(FOLDERS, itertools.cycle(DTYPES)),
            *IN_THE_NORMAL_RUN,
            ("embedder-bert", "int8"),
            ("classifier-deberta-v2", "int8"),
        }
    ),
    keep=IN_THE_NORMAL_RUN,
)
async def test_the_first_start_the_second_and_one_without_a_cache_give_the_same_bits(
    name: str, dtype: Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(selection, "has_native_bfloat16", lambda device: True)
    folder = FOLDERS[name](tmp_path / name)
    first, second, uncached = [await computed(folder, dtype, cache) for cache in (tmp_path / "c", tmp_path / "c", "")]
    assert first == second == uncached


def compute_in_a_process(folders: Mapping[str, Path], dtype: Dtype, cache: Path, both: Barrier, said: Any) -> None:
    selection.has_native_bfloat16 = lambda device: True
    found = {}
    for name, folder in folders.items():
        both.wait(600)
        try:
            found[name] = trio.run(partial(computed, folder, dtype, cache))
        except Exception as error:
            found[name] = f"{name} cannot be computed: {error!r}"
    said.put(found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_replicas_that_start_at_once_give_the_same_bits(dtype: Dtype, tmp_path: Path):
    """With an empty cache: one converts, the other waits and reads."""
    folders = {name: write(tmp_path / name) for name, write in FOLDERS.items()}
    spawn = multiprocessing.get_context("spawn")
    said, both = spawn.Queue(), spawn.Barrier(2)
    arguments = (folders, dtype, tmp_path / "cache", both, said)
    replicas = [spawn.Process(target=compute_in_a_process, args=arguments) for _ in range(2)]
    for replica in replicas:
        replica.start()
    first, second = [said.get(timeout=800) for _ in replicas]
    for replica in replicas:
        replica.join()
    assert first == second
    assert [what for what in first.values() if "cannot be computed" in what] == []
