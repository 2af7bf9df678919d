"""``run-batch`` writes the lines that vLLM's ``run-batch`` has written, but for the differences listed here.

vLLM's are in vllm_lines.json, recorded from vLLM 0.32.0 (``record_vllm_lines.py``); its format is declared in
``vllm/entrypoints/launchers/run_batch.py`` there. A line that ends vLLM's run is a line with an error here.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.bulk.record_vllm_lines import PATH
from tests.bulk.vllm_lines import LINES
from tests.compatibility.http_answer import shortened
from tests.compatibility.vllm_cases.case import Case
from tests.compatibility.vllm_comparison import differences
from tests.compatibility.vllm_folders import KINDS
from trio_pool_serve.bulk.bulk_options import BatchModelOptions, BatchOptions
from trio_pool_serve.bulk.run_batch import run_batch

RECORD = json.loads(PATH.read_text())

OWN = BatchModelOptions(model_dtype="float32", device="cpu", backend="torch", served_model_name="m")

SENTENCE, OBJECT, NONE = str, dict, type(None)

DIFFERENT: Mapping[tuple[str, str], tuple[int, type]] = {
    ("embedding", "dimensions"): (200, NONE),  # as its server, which truncates the vectors of every model
    ("embedding", "pooling"): (200, NONE),  # a route that vLLM's command does not have
    ("embedding", "classify"): (400, OBJECT),
    ("embedding", "sparse of TEI"): (424, OBJECT),
    ("embedding", "score /v3/score"): (400, SENTENCE),  # vLLM goes by how a path ends
    ("embedding", "rerank /v2/rerank"): (200, NONE),  # Cohere's, with Cohere's fields
    ("embedding", "an empty custom_id"): (400, SENTENCE),
    ("embedding", "a long custom_id"): (400, SENTENCE),
    ("embedding", "GET"): (400, SENTENCE),
    ("cross-encoder", "score /v3/score"): (400, SENTENCE),
    ("cross-encoder", "rerank /v2/rerank"): (200, NONE),
    ("cross-encoder", "embeddings of a scorer"): (400, OBJECT),
    ("cross-encoder", "classify"): (200, NONE),
    ("classifier", "classify"): (200, NONE),
    ("classifier", "pooling"): (200, NONE),
    ("classifier", "embeddings of a classifier"): (400, OBJECT),
    ("classifier", "a score of a classifier"): (400, OBJECT),
}
"""Status, and the kind of error, of this package's lines."""

STREAMED = {"stream"}
"""Lines that the routes of this server respond to with a stream, where vLLM's ignore the field."""

GIVEN_IDS = {"no method": "m", "no url": "u", "no body": "b", "a body of another type": "b"}
"""What is kept of lines that end vLLM's run."""


@pytest.mark.parametrize("kind", list(LINES))
async def test_lines_are_as_vllm_s(tmp_path: Path, kind: str):
    lines = LINES[kind]
    assert list(RECORD[kind]) == list(lines)
    model = KINDS[kind].write(tmp_path / "model")
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n\n".join(lines.values()))
    options = BatchOptions(input_file=str(source), output_file=str(target), model=str(model))
    assert await run_batch(options, OWN) == 3
    written = target.read_bytes()
    assert written.endswith(b"\n")
    found = dict(zip(lines, written.decode().splitlines(), strict=True))
    wrong = {name: "; ".join(_wrong(kind, name, line, found[name])) for name, line in lines.items()}
    assert {name: said for name, said in wrong.items() if said} == {}


def _wrong(kind: str, name: str, line: str, found: str) -> list[str]:
    ours, recorded = json.loads(found), RECORD[kind][name]
    if isinstance(recorded, dict):
        return _wrong_where_vllm_aborts(name, line, ours)
    theirs = json.loads(recorded)
    said = _wrong_form(theirs, ours, found)
    if (kind, name) in DIFFERENT:
        status, error = DIFFERENT[kind, name]
        if (ours["response"]["status_code"], type(ours["error"])) != (status, error):
            said.append(f"{ours['response']['status_code']} and {ours['error']}, expected {status} and {error}")
        return said
    if ours["custom_id"] != theirs["custom_id"]:
        said.append("another custom_id")
    if name in STREAMED:
        theirs = json.loads(RECORD[kind]["bytes"])
    said += [f"error is {ours['error']}" for _ in [0] if type(ours["error"]) is not type(theirs["error"])]
    if isinstance(theirs["error"], str) and not said:
        beginnings = [error.partition("Supported endpoints:")[0] for error in (theirs["error"], ours["error"])]
        return [f"error is {ours['error']!r}"] if beginnings[0] != beginnings[1] else []
    request = json.loads(line)
    case = Case(name=name, kinds=(kind,), path=request["url"], body=request["body"])
    return said + differences(case, _answer(theirs), _answer(ours))


def _wrong_form(theirs: Any, ours: Any, found: str) -> list[str]:
    """Compare all that is not in the body or the error: names, their order, spaces, nulls."""
    said = []
    if list(ours) != list(theirs) or list(ours["response"]) != list(theirs["response"]):
        said.append(f"other names: {list(ours)}, {list(ours['response'])}")
    if (ours["response"]["body"] is None) != (ours["error"] is not None):
        said.append("a body beside an error, or neither")
    beginning = json.dumps(
        {"id": ours["id"], "custom_id": ours["custom_id"]}, separators=(",", ":"), ensure_ascii=False
    )
    if not found.startswith(beginning.removesuffix("}") + ',"response":{"status_code":'):
        said.append(f"written otherwise: {found[:100]}")
    return said


def _answer(line: Any) -> dict[str, Any]:
    body = line["response"]["body"]
    return {"status": line["response"]["status_code"], "json": shortened(line["error"] if body is None else body)}


def _wrong_where_vllm_aborts(name: str, line: str, ours: Any) -> list[str]:
    is_request = name in ("an input of another type", "no input", "a number for dimensions", "no documents")
    said = _wrong_form(ours, ours, json.dumps(ours, separators=(",", ":"), ensure_ascii=False))
    if ours["response"]["status_code"] != 400 or type(ours["error"]) is not (OBJECT if is_request else SENTENCE):
        said.append(f"{ours['response']['status_code']} and {ours['error']}")
    expected = json.loads(line)["custom_id"] if is_request else GIVEN_IDS.get(name)
    if ours["custom_id"] != expected:
        said.append(f"custom_id is {ours['custom_id']}, expected {expected}")
    return said
