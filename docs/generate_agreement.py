"""Writes docs/agreement.md from docs/agreement.json, which ``scripts/test --write-agreement -m ""`` writes."""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

SOURCE = Path(__file__).parent / "agreement.json"
TARGET = Path(__file__).parent / "agreement.md"

HEAD = """# Agreement with other libraries, and tested clients

The server's outputs agree with sentence-transformers, transformers, PEFT and the formulas of model cards. This page
lists the measured differences. `docs/generate_agreement.py` generates it from the records of passing tests, slow ones
included: `scripts/test --write-agreement -m ""`.

## Models
Each model is tiny, has random weights unless the table says otherwise, and is stored in the layout that its authors
publish. It is computed in float32 on CPU. Models of each kind are requested through the HTTP routes.

- *Model* is an architecture, or the function in `tests/models/` that writes the model's folder.
- *Reference* is the library or formula that computes the expected outputs.
- *Difference* is the largest absolute difference of any number, over texts of mixed lengths, each alone and in batches
  with others.

| model | task | reference | difference |
| --- | --- | --- | ---: |
"""

DEFAULT_FLAGS = """
## By default, on a CPU that computes bfloat16
Each kind of model is served by `trio-pool-serve serve MODEL` without any flag, and compared with torch in float32.

- *Error* is the largest difference of any number, relative to the greatest number of that model's responses.
- *Cosine* is the lowest of all rows; for scores, the cosine of all scores together.

In bfloat16, the tests allow errors up to 0.12 and cosines from 0.99; in float32, 1e-4 and 0.99999. Weights are random,
except for MiniLM, all-mpnet-base-v2 and splade-tiny. Torch computes a model if OpenVINO does not support its kind, is
not faster, or has other outputs. splade_modernbert keeps its twelve greatest weights; only weights in both responses
are compared.

| model | computed by | error | cosine |
| --- | --- | ---: | ---: |
"""

ARCHITECTURES = """
## Every text architecture of transformers
Each model type of transformers that reads token ids is tried with default flags, on a CPU that computes bfloat16, and
with `--dtype float32`; torch computes both. Models are tiny and have random weights. *Agrees*: the means of states are
the means that transformers computes in the same data type. The names are values of `model_type` in config.json.

| default flags | `--dtype float32` | model types |
| --- | --- | --- |
"""

CLIENTS = """
## Clients
Each client is run against a live server.

| dialect | route | client |
| --- | --- | --- |
"""


def agreement_page() -> str:
    """Return the text of docs/agreement.md."""
    record = json.loads(SOURCE.read_text())
    models = [
        (row["family"], row["task"], row["oracle"], f"{row['largest_difference']:.1e}") for row in record["agreement"]
    ]
    clients = [(row["dialect"], f"`{row['route']}`", row["client"]) for row in record["clients"]]
    defaults = [
        (row["kind"], f"{row['by']}, {row['dtype']}", f"{row['error']:.1e}", f"{row['cosine']:.5f}")
        for row in record["default_flags"]
    ]
    by_outcome = defaultdict[tuple[str, str], list[str]](list)
    for row in record["architectures"]:
        by_outcome[row["by_default"], row["in_float32"]].append(f"`{row['name']}`")
    outcomes = [
        (by_default, "the same" if in_float32 == by_default else in_float32, ", ".join(names))
        for (by_default, in_float32), names in sorted(by_outcome.items())
    ]
    tables = (HEAD, models), (DEFAULT_FLAGS, defaults), (ARCHITECTURES, outcomes), (CLIENTS, clients)
    return "".join(text + _rows(rows) for text, rows in tables)


def _rows(rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    TARGET.write_text(agreement_page())
