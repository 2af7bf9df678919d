"""By OpenVINO every family gives what it gives by torch, and at every start and by every replica the same bits."""

import hashlib
import itertools
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import trio

from tests.lanes import sampled
from tests.models import classifier_families, model_families, retrieval_families
from tests.models.adapter_folders import ADAPTERS, write_adapted
from tests.models.model_families import TEXTS, ServedModel
from trio_pool_serve.config import Dtype
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.loading import openvino_loading
from trio_pool_serve.prompts import InputType, PairPrompt, Prompt, TextPrompt
from trio_pool_serve.types import (
    Classify,
    Embed,
    PoolingParams,
    SparseEmbed,
    SparseLookup,
    SparseVector,
    TokenClassify,
    TokenEmbed,
)

pytest.importorskip("openvino")

TOLERANCE = 3e-5
"""Of any number; random weights give some of a hundred. Mistral's and Llama's differ most, by 2.5e-5."""

FOLDERS: Mapping[str, Callable[[Path], Path]] = {
    **{f"embedder-{name}": partial(model_families.write_family, name=name) for name in model_families.FAMILIES},
    **{f"classifier-{n}": partial(classifier_families.write_classifier, name=n) for n in classifier_families.FAMILIES},
    **{
        f"token-classifier-{name}": partial(classifier_families.write_classifier, name=name, head="TokenClassification")
        for name in ("bert", "deberta-v2", "modernbert", "qwen2")
    },
    **{
        f"late-interaction-{name}": make
        for name, make in retrieval_families.LATE_INTERACTION.items()
        if name != "pylate_expanding_modernbert"  # which torch computes: see test_openvino_loading.py
    },
    **{f"sparse-{name}": make for name, make in retrieval_families.SPARSE.items()},
    **model_families.LAYOUTS,
    **classifier_families.POOLED,
    "bge-m3": retrieval_families.write_bge_m3,
    **{f"adapter-{name}": partial(write_adapted, name=name) for name in ADAPTERS},
}

IN_THE_NORMAL_RUN = frozenset(
    {
        "embedder-bert", "embedder-modernbert", "embedder-qwen3", "embedder-gemma3", "classifier-deberta-v2",
        "token-classifier-bert", "late-interaction-colbert_v2", "sparse-splade_max", "bge-m3",
        "bert_with_weighted_layers", "modernbert_with_pooled_scores", "adapter-bert",
    }
)  # fmt: skip

PAIRS = [PairPrompt(first, second) for first, second in zip(TEXTS[:3], TEXTS[2:5], strict=True)]


@pytest.mark.parametrize(
    "name", [name if name in IN_THE_NORMAL_RUN else pytest.param(name, marks=pytest.mark.slow) for name in FOLDERS]
)
async def test_openvino_gives_what_torch_gives(name: str, tmp_path: Path):
    path = FOLDERS[name](tmp_path / name)
    by_torch = ServedModel(path)
    by_openvino = ServedModel(path, settings={"backend": "openvino", "cache_dir": ""})
    assert str(by_openvino.runner.facts).endswith("by OpenVINO")
    outputs = 0
    for params in (Embed(), TokenEmbed(), SparseEmbed(), SparseLookup(), Classify(), TokenClassify()):
        if type(params) in by_torch.runner.loaded.heads:
            outputs += 1
            input_type = input_type_of(by_torch, params)
            for prompts in prompts_of(by_torch, params):
                expected = await by_torch.compute(prompts, params, input_type=input_type)
                for served, together in ((by_torch, False), (by_openvino, True), (by_openvino, False)):
                    ours = await served.compute(prompts, params, together=together, input_type=input_type)
                    assert max(map(difference, ours, expected)) < TOLERANCE
    assert outputs


def input_type_of(served: ServedModel, params: PoolingParams) -> InputType | None:
    """Return the input type of texts for which the model is asked for such params."""
    types: tuple[InputType | None, ...] = (None, "document")
    return next((each for each in types if served.folder.spec.sparse_params(each) == params), None)


def prompts_of(served: ServedModel, params: PoolingParams) -> list[list[Prompt]]:
    """Texts of mixed lengths, and pairs for models with segments."""
    texts: list[Prompt] = [TextPrompt(text) for text in TEXTS]
    return [texts, PAIRS] if isinstance(params, Classify) and "score" in served.folder.spec.tasks else [texts]


def difference(ours: Any, expected: Any) -> float:
    """The largest difference; of sparse vectors, whose weights near zero may be missing, that of all weights."""
    if isinstance(expected, SparseVector):
        weights = [dict(zip(v.indices.tolist(), v.values.tolist(), strict=True)) for v in (ours, expected)]
        return max((abs(weights[0].get(i, 0) - weights[1].get(i, 0)) for i in {*weights[0], *weights[1]}), default=0)
    return float(np.abs(np.asarray(ours) - np.asarray(expected)).max(initial=0))


# -- the same bits at every start --------------------------------------------------------------------------------

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
    """A third of the kinds, in the types in turn. With an empty cache one replica converts, the other waits for it."""
    folders = {name: write(tmp_path / name) for name, write in [*FOLDERS.items()][::3]}
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
