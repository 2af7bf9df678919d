"""Which files a source stands for."""

import json
import os
from hashlib import sha256
from http.server import BaseHTTPRequestHandler

import pyarrow as pa
import pytest

from tests.bulk.file_store import served_by
from tests.runs.tables.table_files import all_rows, printed, values, write_table
from tests.server.server_process import free_port
from trio_pool_serve.errors import BulkInputError
from trio_pool_serve.runs.tables.input_table import open_input
from trio_pool_serve.runs.tables.table_formats import Format


def names(source, given=None) -> list[str]:
    return [file.name for file in open_input(str(source), format=given).files]


def test_a_glob_is_its_files_sorted_by_their_names_below_it(tmp_path):
    for name in ("b/2.jsonl", "b/1.jsonl", "a/9.jsonl", "a/deep/0.jsonl", "a/notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'"{name}"\n')
    assert names(tmp_path / "*" / "*.jsonl") == ["a/9.jsonl", "b/1.jsonl", "b/2.jsonl"]
    assert names(tmp_path / "b" / "[12].jsonl") == ["1.jsonl", "2.jsonl"]
    assert names(tmp_path / "**" / "*.jsonl") == ["a/9.jsonl", "a/deep/0.jsonl", "b/1.jsonl", "b/2.jsonl"]
    assert names(tmp_path / "a" / "9.jsonl") == ["9.jsonl"]
    rows = all_rows(tmp_path / "*" / "*.jsonl", "text")
    assert values(rows) == ["a/9.jsonl", "b/1.jsonl", "b/2.jsonl"]
    assert [row.place for row in rows] == ["a/9.jsonl:1", "b/1.jsonl:1", "b/2.jsonl:1"]


def test_a_relative_glob_is_named_like_an_absolute_one(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    assert names("*.jsonl") == names("./a.json*") == names(tmp_path / "*.jsonl") == ["a.jsonl"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path):
    for name in ("a[1].jsonl", "a1.jsonl"):
        (tmp_path / name).write_text("")
    assert names(tmp_path / "a[1].jsonl") == ["a[1].jsonl"]


def test_a_folder_is_its_tables(tmp_path):
    for name in ("part-00001.parquet", "part-00000.parquet", "_SUCCESS", ".hidden.parquet", "part-00002.parquet.tmp"):
        write_table(tmp_path / "made.parquet", [{"text": name}], ["text"]).rename(tmp_path / name)
    assert values(all_rows(tmp_path, "text")) == ["part-00000.parquet", "part-00001.parquet"]


INDICES = '{"_data_files": [], "_indices_data_files": [{"filename": "x"}]}'
ONE_OF_EACH = r"all files must have the same format: [ab]\.jsonl is jsonl, c\.csv is csv"

REFUSED: list[tuple[dict[str, str], str, str | None, str]] = [
    *[({}, source, None, "no such file") for source in ("none.jsonl", "*.jsonl", "none/a.jsonl", "")],
    *[({"a.jsonl": "", "b.jsonl": "", "c.csv": ""}, source, None, ONE_OF_EACH) for source in ("", "*")],
    ({"a.jsonl": "", "c.jsonl.gz": ""}, "", "jsonl", r"c\.jsonl\.gz is jsonl\.gz"),
    ({}, "-", None, "Set --input-format"),
    ({}, "-", "parquet", "parquet cannot be read from standard input"),
    ({"dataset_dict.json": '{"splits": ["train", "test"]}'}, "", None, r"Name one of: .*/train, .*/test\."),
    ({"state.json": '{"_data_files": [{"filename": "none.arrow"}]}'}, "", None, "lacks the file none.arrow"),
    ({"state.json": '{"_data_files": [{"filename": "../data.arrow"}]}'}, "", None, "lists files outside the folder"),
    ({"state.json": INDICES}, "", None, "flatten_indices"),
    ({"state.json": "{}"}, "", None, "was not written by save_to_disk"),
    ({"state.json": "{"}, "", None, "was not written by save_to_disk"),
]


@pytest.mark.parametrize(("files", "source", "given", "message"), REFUSED)
def test_a_source_that_cannot_be_used_is_an_error_that_says_why(tmp_path, files, source, given, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(BulkInputError, match=message):
        open_input("-" if source == "-" else str(tmp_path / source), format=given)


def test_a_format_that_is_given_is_that_of_all_files(tmp_path):
    for name in ("a.jsonl", "c.csv"):
        (tmp_path / name).write_text("")
    assert open_input(str(tmp_path / "*"), format="csv").format == Format("csv")


# -- datasets that were saved -----------------------------------------------------------------------


def save_to_disk(folder, shards: list[list[str]]) -> None:
    """Lay files out as ``Dataset.save_to_disk`` of datasets 4 does."""
    folder.mkdir(parents=True)
    state = {"_fingerprint": "0f", "_format_columns": None, "_split": "train", "_data_files": []}
    for index, texts in enumerate(shards):
        name = f"data-{index:05d}-of-{len(shards):05d}.arrow"
        table = pa.table({"text": texts})
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table)
        state["_data_files"].append({"filename": name})
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    (folder / "dataset_info.json").write_text("{}")


def test_a_saved_dataset_is_its_files_in_their_order(tmp_path):
    save_to_disk(tmp_path / "saved", [["a", "b"], ["c"]])
    state = json.loads((tmp_path / "saved" / "state.json").read_text())
    state["_data_files"].reverse()
    (tmp_path / "saved" / "cache-1234.arrow").write_bytes(b"of another function")
    assert values(all_rows(tmp_path / "saved", "text")) == ["a", "b", "c"]
    (tmp_path / "saved" / "state.json").write_text(json.dumps(state))
    assert values(all_rows(tmp_path / "saved", "text")) == ["c", "a", "b"]


# -- the hub ----------------------------------------------------------------------------------------

FILES = {
    "README.md": b"A data set.",
    "data/train-0.jsonl": b'{"text": "first"}\n',
    "data/train-1.jsonl": b'{"text": "second"}\n',
    "other.csv": b"text\nthird\n",
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's HTTP API that ``snapshot_download`` uses, for one data set."""

    def do_GET(self):
        path = self.path.partition("?")[0]
        name = path.removeprefix(f"/datasets/owner/texts/resolve/{COMMIT}/")
        headers = {"X-Repo-Commit": COMMIT}
        if path in {"/api/datasets/owner/texts/revision/main", "/api/datasets/owner/texts/revision/v1"}:
            siblings = [{"rfilename": name} for name in FILES]
            body = json.dumps({"id": "owner/texts", "sha": COMMIT, "siblings": siblings, "tags": []}).encode()
        elif path == f"/api/datasets/owner/texts/tree/{COMMIT}":
            files = [{"type": "file", "path": name, "size": len(FILES[name]), "oid": "0" * 40} for name in FILES]
            body = json.dumps(files).encode()
        elif name in FILES:
            body = FILES[name]
            headers["ETag"] = f'"{sha256(body).hexdigest()}"'
        else:
            headers["X-Error-Code"] = "RevisionNotFound" if "/texts/" in path else "RepoNotFound"
            body = b""
        self.send_response(200 if body else 404)
        for header, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *args):
        pass


READER = """
import sys
from trio_pool_serve.runs.tables.input_table import open_input
from trio_pool_serve.errors import BulkInputError
for source in sys.argv[1:]:
    try:
        table = open_input(source)
        print([(row.place, row.values[0]) for row in table.rows(["text"], None)])
    except BulkInputError as error:
        print(error)
"""


def read_from_hub(tmp_path, endpoint: str, *sources: str) -> list[str]:
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    sources = [f"hf://datasets/{source}" for source in sources]
    return printed(READER, *sources, env=environment).decode().splitlines()


def test_a_dataset_of_the_hub_is_downloaded_and_read(tmp_path):
    with served_by(Hub) as endpoint:
        known = ("owner/texts/other.csv", "owner/texts/data/*.jsonl", "owner/texts@v1/*-1.jsonl", "owner/texts")
        read = read_from_hub(tmp_path, endpoint, *known, "owner/texts@v2", "owner/none", "none")
    assert read[:3] == [
        "[('other.csv:2', 'third')]",
        "[('data/train-0.jsonl:1', 'first'), ('data/train-1.jsonl:1', 'second')]",
        "[('data/train-1.jsonl:1', 'second')]",
    ]
    assert "all files must have the same format" in read[3]
    assert read[4].startswith("hf://datasets/owner/texts@v2 cannot be downloaded: ")
    assert read[5].startswith("hf://datasets/owner/none cannot be downloaded: ")
    assert read[6].endswith("must be hf://datasets/OWNER/NAME[@REVISION][/GLOB].")
    assert len(read) == 7


def test_a_hub_that_cannot_be_reached_is_one_clear_error(tmp_path):
    (read,) = read_from_hub(tmp_path, f"http://127.0.0.1:{free_port()}", "owner/texts")
    assert read.startswith("hf://datasets/owner/texts cannot be downloaded: ")
