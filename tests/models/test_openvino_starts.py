"""By OpenVINO every start and every replica computes the same bits; few models in the normal run."""

import hashlib
import itertools
import multiprocessing
from collections.abc import Mapping, Sequence
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
from trio_pool_serve.models.loading import openvino_loading
from trio_pool_serve.prompts import TextPrompt
from trio_pool_serve.types import Classify, Embed, SparseEmbed, SparseVector, TokenClassify, TokenEmbed

pytest.importorskip("openvino")

DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")


async def computed(folder: Path, dtype: Dtype, cache: Path | str) -> str:
    """A digest of everything that a model gives, which is loaded for this; or why OpenVINO does not compute it."""
    try:
        served = ServedModel(folder, dtype=dtype, settings={"backend": "openvino", "cache_dir": str(cache)})
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


@sampled(
    ("name", "dtype"),
    [
        ("embedder-gemma3", "float32"),
        ("classifier-deberta-v2", "bfloat16"),
        ("late-interaction-pylate_modernbert", "bfloat16"),
        ("embedder-bert", "int8"),
        ("classifier-deberta-v2", "int8"),
    ],
    keep=[("embedder-gemma3", "float32"), ("classifier-deberta-v2", "bfloat16")],
)
async def test_the_first_start_the_second_and_one_without_a_cache_give_the_same_bits(
    name: str, dtype: Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(openvino_loading, "has_native_bfloat16", lambda: True)
    folder = FOLDERS[name](tmp_path / name)
    first, second, uncached = [await computed(folder, dtype, cache) for cache in (tmp_path / "c", tmp_path / "c", "")]
    assert first == second == uncached


def compute_in_a_process(folders: Mapping[str, Path], caches: Sequence[Path | str], both: Barrier, said: Any) -> None:
    openvino_loading.has_native_bfloat16 = lambda: True
    found = {}
    for (name, folder), dtype in zip(folders.items(), itertools.cycle(DTYPES)):
        both.wait(600)
        try:
            found[name] = {trio.run(partial(computed, folder, dtype, cache)) for cache in caches}
        except Exception as error:
            found[name] = {f"{name} cannot be computed: {error!r}"}
    said.put(found)


@pytest.mark.slow
def test_two_replicas_that_start_at_once_and_one_without_a_cache_give_the_same_bits(tmp_path: Path):
    """Every kind, in the types in turn. With an empty cache one replica converts, the other waits and reads."""
    folders = {name: write(tmp_path / name) for name, write in FOLDERS.items()}
    spawn = multiprocessing.get_context("spawn")
    said, both = spawn.Queue(), spawn.Barrier(2)
    cache = tmp_path / "cache"
    replicas = [
        spawn.Process(target=compute_in_a_process, args=(folders, caches, both, said))
        for caches in ((cache,), (cache, ""))
    ]
    for replica in replicas:
        replica.start()
    first, second = [said.get(timeout=800) for _ in replicas]
    for replica in replicas:
        replica.join()
    digests = {name: first[name] | second[name] for name in folders}
    assert {
        name: found for name, found in digests.items() if len(found) > 1 or "cannot be computed" in min(found)
    } == {}
