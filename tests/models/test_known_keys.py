"""docs/model-files.md lists the keys of a model's files that are obeyed, without effect, or refused."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from trio_pool_serve.models.files.known_keys import KNOWN_KEYS

pytestmark = pytest.mark.unit

PAGE = Path(__file__).parents[2] / "docs" / "model-files.md"
KINDS = {
    "`sentence_bert_config.json`": "Transformer",
    "`config_sentence_transformers.json`": None,
    "LoRA adapters": "LoRA",
}


def rows_of_the_page() -> Iterator[tuple[str, str, str]]:
    """Yield the kind, the key and the treatment of the keys in the tables that the server checks."""
    kind = None
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            kind = KINDS.get(line.removeprefix("## "), "module" if line == "## Modules" else None)
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if kind is None or not line.startswith("| ") or cells[0] in ("key", "module", "---"):
            continue
        of, keys, treatment = (kind, *cells[:2]) if kind in ("Transformer", "LoRA") else cells[:3]
        for key in re.findall(r"`([^`]+)`", keys):
            section, dot, inner = key.partition(".")
            yield (section, inner, treatment) if dot else (of, key, treatment)


def test_the_page_lists_exactly_the_keys_that_are_known():
    listed: dict[str, set[str]] = {}
    for kind, key, treatment in rows_of_the_page():
        if treatment in ("obeyed", "no effect"):
            listed.setdefault(kind, set()).add(key)
        else:
            assert treatment == "refused"
            assert key not in KNOWN_KEYS[kind].split()
    assert listed.keys() - KNOWN_KEYS.keys() == {"Dense", "Normalize"}
    assert {kind: set(keys.split()) for kind, keys in KNOWN_KEYS.items()} == {
        kind: keys for kind, keys in listed.items() if kind in KNOWN_KEYS
    }
