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


def test_what_is_not_there_is_an_error(tmp_path):
    for source in ("none.jsonl", "*.jsonl", "none/a.jsonl", ""):
        with pytest.raises(BulkInputError, match="no file found"):
            open_input(str(tmp_path / source))


def test_files_of_several_formats_are_an_error_that_names_one_of_each(tmp_path):
    for name in ("a.jsonl", "b.jsonl", "c.csv"):
        (tmp_path / name).write_text("")
    for source in (tmp_path, tmp_path / "*"):
        with pytest.raises(BulkInputError, match=r"they must have one: [ab]\.jsonl is jsonl, c\.csv is csv"):
            open_input(str(source))
    assert open_input(str(tmp_path / "*"), format="csv").format == Format("csv")
    (tmp_path / "c.csv").rename(tmp_path / "c.jsonl.gz")
    with pytest.raises(BulkInputError, match=r"c\.jsonl\.gz is jsonl\.gz"):
        open_input(str(tmp_path), format="jsonl")


def test_a_folder_is_its_tables(tmp_path):
    for name in ("part-00001.parquet", "part-00000.parquet", "_SUCCESS", ".hidden.parquet", "part-00002.parquet.tmp"):
        write_table(tmp_path / "made.parquet", [{"text": name}], ["text"]).rename(tmp_path / name)
    assert values(all_rows(tmp_path, "text")) == ["part-00000.parquet", "part-00001.parquet"]


def test_standard_input_needs_a_format_of_lines():
    with pytest.raises(BulkInputError, match="name its format"):
        open_input("-")
    with pytest.raises(BulkInputError, match="parquet cannot be read from standard input"):
        open_input("-", format="parquet")


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


def test_a_folder_of_splits_is_an_error_that_names_them(tmp_path):
    save_to_disk(tmp_path / "saved" / "train", [["a"]])
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(BulkInputError, match=r"Name one: .*/saved/train, .*/saved/test\."):
        open_input(str(tmp_path / "saved"))
    assert values(all_rows(tmp_path / "saved" / "train", "text")) == ["a"]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ('{"_data_files": [{"filename": "none.arrow"}]}', "has no file none.arrow"),
        ('{"_data_files": [{"filename": "../data.arrow"}]}', "names files outside of the folder"),
        ('{"_data_files": [], "_indices_data_files": [{"filename": "x"}]}', "flatten_indices"),
        ("{}", "was not written by save_to_disk"),
        ("{", "was not written by save_to_disk"),
    ],
)
def test_a_saved_dataset_that_cannot_be_used_is_an_error(tmp_path, state, reason):
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(BulkInputError, match=reason):
        open_input(str(tmp_path))


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
    assert "files of several formats" in read[3]
    assert read[4].startswith("hf://datasets/owner/texts@v2 cannot be downloaded: ")
    assert read[5].startswith("hf://datasets/owner/none cannot be downloaded: ")
    assert read[6].endswith("a dataset of the hub is hf://datasets/OWNER/NAME[@REVISION][/GLOB].")
    assert len(read) == 7


def test_a_hub_that_cannot_be_reached_is_one_clear_error(tmp_path):
    (read,) = read_from_hub(tmp_path, f"http://127.0.0.1:{free_port()}", "owner/texts")
    assert read.startswith("hf://datasets/owner/texts cannot be downloaded: ")
