"""docs/published-models.md is true: each folder that it names is read and computed, or refused, as its row says."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.models.classifier_families import PAIRS, PROMPTS, cross_encoder
from tests.models.model_families import TEXTS, ServedModel, reference, shuffled
from tests.models.published_layouts import LAYOUTS, TABLE, parameters_of, quoted, write_published, write_tiny
from tests.models.test_agreement import asked_by_type, difference, encoded_by_type
from tests.server.server_process import ROOT
from trio_pool_serve.checking.model_report import kind_of
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.prompts import TextPrompt
from trio_pool_serve.types import Batch, Classify, PoolingRequest, TokenClassify, TokenEmbed

TOLERANCE = 1e-5
ROWS = {row["ids"][0]: row for row in TABLE}
QUOTED = {name: row for name, row in ROWS.items() if "config.json" in row.get("files", {})}
SERVED = {name: row for name, row in ROWS.items() if row["verdict"] == "served" and name in LAYOUTS}
REFUSED = {name: row for name, row in ROWS.items() if row["verdict"] == "refused"}
EXPECTED = {name: row for name, row in ROWS.items() if row["verdict"] == "expected"}
WITH_WEIGHTS = "sentence-transformers/all-MiniLM-L6-v2"
READ = [
    (first, name)
    for first, row in QUOTED.items()
    if first in SERVED and LAYOUTS[first].is_read_alone
    for name in (first, *row.get("differences", {}))
]
"""The models whose own config.json is quoted: the first of the row, and the model."""

TASKS = {
    **dict.fromkeys(("embedding", "dual_encoder", "vision_language"), "embed"),
    **dict.fromkeys(("late_interaction", "page_retrieval"), "token_embed"),
    **dict.fromkeys(("token_classifier", "process_reward"), "token_classify"),
    "cross_encoder": "score", "sequence_classifier": "classify", "sparse": "sparse_embed",
}  # fmt: skip
"""The task that is compared, by the kind of a row."""


def settings_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of a row as settings of a ``ModelConfig``."""
    words = row.get("flags", "").split()
    return {flag.removeprefix("--"): value for flag, value in zip(words[::2], words[1::2], strict=True)}


def test_no_model_has_two_rows_and_each_row_is_judged_by_something():
    ids = [name for row in TABLE for name in row["ids"]]
    assert len(ids) == len(set(ids)) >= 30
    assert {*SERVED, *REFUSED, *EXPECTED, WITH_WEIGHTS} == {
        name for name, row in ROWS.items() if row["verdict"] != "unknown"
    }
    assert all(row["sources"] for row in TABLE)
    assert all(row.get("files") for row in (*SERVED.values(), *REFUSED.values()))
    assert all({*row.get("parameters", ()), *row.get("differences", ())} <= {*row["ids"]} for row in TABLE)


def test_one_line_of_the_page_says_whether_a_model_works_and_how_to_serve_it():
    page = (ROOT / "docs" / "published-models.md").read_text()
    lines = re.findall(r"^\| (\S+) \| (yes|expected|no|not known) \| \w+ \| \d* \| [^|]* \| (.*?) \|", page, re.M)
    assert {"BAAI/bge-m3": ("yes", "`trio-pool-serve serve BAAI/bge-m3`")}.items() <= {
        name: (works, command) for name, works, command in lines
    }.items()
    assert sorted(name for name, *_ in lines) == sorted(name for row in TABLE for name in row["ids"])


def test_a_model_is_expected_to_work_if_the_same_architecture_was_compared():
    record = json.loads((ROOT / "docs" / "agreement.json").read_text())["agreement"]
    compared = {(row["family"], row["task"]) for row in record}
    assert {(row["like"], TASKS[row["kind"]]) for row in EXPECTED.values()} <= compared


@pytest.mark.parametrize(("first", "name"), READ)
def test_the_published_text_is_read_as_the_row_says(first: str, name: str, tmp_path: Path):
    """In its full size, without weights."""
    path, row = tmp_path / "model", ROWS[first]
    files = {**row["files"], "config.json": json.dumps(own_config(row, name))}
    write_published(path, {**row, "files": files})
    LAYOUTS[first].tokenizer().backend_tokenizer.save(str(path / "tokenizer.json"))
    folder = read_model_folder(path, ModelConfig(**settings_of(row)))
    assert {"kind": kind_of(folder), "longest": folder.max_model_len} == {key: row[key] for key in ("kind", "longest")}
    if "composed" not in row:
        assert parameters_of(folder, row["kind"]) == row["parameters"][name]


def own_config(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {**quoted(row)["config.json"], **row.get("differences", {}).get(name, {})}


def test_other_numbers_of_parameters_are_those_that_mteb_lists():
    models = pytest.importorskip("mteb.models.model_implementations").MODEL_REGISTRY
    counted = {name for first, name in READ if "composed" not in ROWS[first]}
    listed = {name: number for row in TABLE for name, number in row.get("parameters", {}).items()}
    others = {name: number for name, number in listed.items() if name not in counted}
    assert len(others) > 100
    assert all({*row.get("sized_like", {}).values()} <= listed.keys() for row in TABLE)
    assert all(row.get("sized_like", {}).keys() <= {*row["ids"]} - listed.keys() for row in TABLE)
    unlisted = {name for name, number in others.items() if name not in models or models[name].n_parameters != number}
    assert unlisted == {"distilbert/distilbert-base-uncased-finetuned-sst-2-english"}, "counted, from a composed config"


def test_the_packaged_model_is_what_its_row_says(minilm: Path):
    folder, row = read_model_folder(minilm), ROWS[WITH_WEIGHTS]
    assert (kind_of(folder), folder.max_model_len) == (row["kind"], row["longest"])


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_is_refused_with_the_message_of_its_row(name: str, tmp_path: Path):
    path, row = tmp_path / "model", ROWS[name]
    write_tiny(path, row)
    with pytest.raises(ModelLoadError) as refused:
        ServedModel(path, settings=settings_of(row))
    assert str(refused.value).replace(str(path), "MODEL") == row["message"]


async def farthest(ours: ServedModel, requests: Sequence[PoolingRequest], expected: Sequence[Any]) -> float:
    """The largest difference of the rows, each alone and all in a shuffled batch."""
    batches = [[row] for row in range(len(requests))] + [shuffled(requests)]
    found = []
    for batch in batches:
        values = await ours.runner.launch(Batch(tuple(requests[row] for row in batch)))
        found += [difference(value, expected[row]) for (value,), row in zip(values, batch, strict=True)]
    return max(found)


async def embedding(ours: ServedModel, path: Path, longest: int) -> float:
    theirs, texts = reference(path, model_kwargs={"torch_dtype": torch.float32}), list(TEXTS)
    requests, expected = await ours.requests(TEXTS), [theirs.encode(texts)]
    for name, prompt in ours.folder.prompts.items():
        requests += await ours.requests(TEXTS, instruction=prompt)
        expected.append(theirs.encode(texts, prompt_name=name))
    length = ours.folder.max_model_len
    assert length == min(theirs.max_seq_length, longest or length)  # a table of tokens has no limit there
    assert ours.folder.spec.similarity == theirs.similarity_fn_name
    return await farthest(ours, requests, np.concatenate(expected))


async def pairs(ours: ServedModel, path: Path, _: int) -> float:
    expected = cross_encoder(path, model_kwargs={"torch_dtype": torch.float32}).predict(PAIRS).reshape(-1, 1)
    assert np.ptp(expected) > 0.01, "agreement would prove nothing"
    return await farthest(ours, await ours.requests(PROMPTS, Classify("score")), expected)


async def late_interaction(ours: ServedModel, path: Path, _: int) -> float:
    from sentence_transformers import MultiVectorEncoder

    theirs = MultiVectorEncoder(str(path), device="cpu", local_files_only=True)
    expected = [vectors.numpy() for rows in encoded_by_type(theirs) for vectors in rows]
    return await farthest(ours, await asked_by_type(ours, lambda _: TokenEmbed()), expected)


async def sparse(ours: ServedModel, path: Path, _: int) -> float:
    from sentence_transformers import SparseEncoder

    theirs = SparseEncoder(str(path), device="cpu", local_files_only=True)
    expected = torch.cat(encoded_by_type(theirs, convert_to_sparse_tensor=False)).numpy()
    return await farthest(ours, await asked_by_type(ours, ours.folder.spec.sparse_params), expected)


async def labels(ours: ServedModel, path: Path, _: int) -> float:
    params = TokenClassify() if ours.folder.spec.tasks == {"token_classify"} else Classify()
    expected = [probabilities(path, text) for text in TEXTS]
    assert ours.folder.spec.labels == tuple(quoted_labels(path).values())
    return await farthest(ours, await ours.requests([TextPrompt(text) for text in TEXTS], params), expected)


def probabilities(path: Path, text: str) -> Any:
    """Of a text's labels, or of those of each of its tokens."""
    config, tokens = transformers.AutoConfig.from_pretrained(path), transformers.AutoTokenizer.from_pretrained(path)
    model = getattr(transformers, config.architectures[0]).from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(**tokens(text, truncation=True, return_tensors="pt")).logits[0].softmax(-1).numpy()


def quoted_labels(path: Path) -> dict[str, str]:
    labels: dict[str, str] = json.loads((path / "config.json").read_text())["id2label"]
    return labels


ORACLES = {
    **dict.fromkeys(("sequence_classifier", "token_classifier"), labels),
    **dict.fromkeys(("embedding", "static", "bge_m3"), embedding),
    **dict.fromkeys(("cross_encoder", "generative_reranker"), pairs),
    "late_interaction": late_interaction,
    "sparse": sparse,
}
"""By the kind of a row."""


@pytest.mark.parametrize("name", SERVED)
async def test_a_tiny_model_with_the_published_text_agrees(name: str, tmp_path: Path):
    row = ROWS[name]
    ours = ServedModel(write_tiny(tmp_path / "model", row), settings=settings_of(row))
    assert kind_of(ours.folder) == row["kind"]
    oracle = LAYOUTS[name].oracle
    path = ours.path if oracle is None else oracle(tmp_path / "oracle")
    assert await ORACLES[row["kind"]](ours, path, row.get("longest", 0)) < TOLERANCE
