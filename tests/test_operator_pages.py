"""The pages on running a server: their examples are read as the server reads them, and their lists are complete."""

import shlex
from pathlib import Path

import pytest

from tests.page_blocks import blocks_of
from tests.server.server_process import ROOT
from trio_pool_serve.access.key_file import read_key_file
from trio_pool_serve.api.routes.discovery import AUTH_PATH
from trio_pool_serve.api.routes.operations import ADMIN_PATHS, DRAIN_PATH, PROBE_PATHS
from trio_pool_serve.cli import read_config

DOCS = ROOT / "docs"
PAGES = (
    "run", "keys-and-tls", "systemd", "processes", "openvino", "gpus", "memory", "http", "alerts", "monitoring",
    "reverse-proxies", "overload",
)  # fmt: skip
COMMAND = "trio-pool-serve serve "


def commands_of(page: str) -> list[str]:
    lines = (DOCS / f"{page}.md").read_text().replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith(COMMAND) and "…" not in line]


@pytest.mark.parametrize("command", sorted({command for page in PAGES for command in commands_of(page)}))
def test_the_flags_of_an_example_are_accepted(command: str):
    assert read_config(shlex.split(command)[2:]).sources


def test_pages_begin_with_an_example():
    for page in PAGES:
        lines = (DOCS / f"{page}.md").read_text().splitlines()
        assert any(line.startswith("```") for line in lines[2:9]), page


def test_the_example_of_models_with_settings_of_their_own_is_read(tmp_path: Path):
    (text,) = [block.text for block in blocks_of(DOCS / "run.md") if block.language == "toml"]
    (tmp_path / "serve.toml").write_text(text)
    first, second = read_config(["--config", str(tmp_path / "serve.toml")]).sources
    assert (first.names, second.names) == (("bge", "m3", "bge-large"), ("rerank",))
    assert (first.loading.dtype, second.loading.dtype) == ("int8", "float32")
    assert (first.loading.long_text, second.loading.long_text) == (None, "truncate")


def test_the_example_of_keys_is_read(tmp_path: Path):
    (text,) = [block.text for block in blocks_of(DOCS / "keys-and-tls.md") if block.language == "toml"]
    (tmp_path / "keys.toml").write_text(text)
    keys = {key.name: key for key in read_key_file(tmp_path / "keys.toml", ["minilm"]).values()}
    assert {name: key.admin for name, key in keys.items()} == {"search": False, "operators": True}
    assert keys["search"].requests_per_minute == 600


def test_the_pages_list_all_probes_and_all_routes_for_admins():
    probes, keys = (DOCS / "run.md").read_text(), (DOCS / "keys-and-tls.md").read_text()
    assert [path for path in PROBE_PATHS if f"`{path}`" not in probes.replace("`GET /`", "`/`")] == [AUTH_PATH]
    assert [path for path in ADMIN_PATHS if f"`{path}`" not in keys] == [DRAIN_PATH]
