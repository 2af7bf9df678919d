"""Writes docs/agreement.md from docs/agreement.json, which ``scripts/test --write-agreement -m ""`` writes."""

import json
from collections.abc import Iterable
from pathlib import Path

SOURCE = Path(__file__).parent / "agreement.json"
TARGET = Path(__file__).parent / "agreement.md"

HEAD = """# What has been compared, and which clients have been run

Made by `docs/generate_agreement.py` from what passing tests recorded, slow ones included:
`scripts/test --write-agreement -m ""`.

## Families
Each family is a tiny model with random weights in the layout that its authors publish, computed in float32 on a
processor and asked through the HTTP route. *Difference* is the largest absolute one of any number, over texts of mixed
lengths, alone and in batches together.

| family | task | oracle | difference |
| --- | --- | --- | ---: |
"""

CLIENTS = """
## Clients
Each against a live server.

| dialect | route | client |
| --- | --- | --- |
"""


def agreement_page() -> str:
    """Return the page."""
    record = json.loads(SOURCE.read_text())
    families = [
        (row["family"], row["task"], row["oracle"], f"{row['largest_difference']:.1e}") for row in record["agreement"]
    ]
    clients = [(row["dialect"], f"`{row['route']}`", row["client"]) for row in record["clients"]]
    return HEAD + _rows(families) + CLIENTS + _rows(clients)


def _rows(rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    TARGET.write_text(agreement_page())
