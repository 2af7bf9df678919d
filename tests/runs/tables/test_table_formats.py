"""Formats by extension."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.server_process import ROOT
from trio_pool_serve.errors import BulkInputError
from trio_pool_serve.runs.tables.table_formats import Format, format_of


@pytest.mark.parametrize(
    ("source", "given", "expected"),
    [
        ("a.jsonl", None, Format("jsonl")),
        ("folder.csv/A.NDJSON.GZ", None, Format("jsonl", "gz")),
        ("a.tsv.zst", None, Format("tsv", "zst")),
        (Path("out.parquet"), None, Format("parquet")),
        ("hf://datasets/a/b/data/*.feather", None, Format("arrow")),
        ("texts.txt.gz", "jsonl", Format("jsonl", "gz")),
        ("texts.txt", "csv.zst", Format("csv", "zst")),
        ("a.jsonl.gz", "jsonl.zst", Format("jsonl", "zst")),
        ("-", "jsonl", Format("jsonl")),
        ("a.gz", "parquet", Format("parquet")),
    ],
)
def test_the_given_format_or_the_extension_decides(source, given, expected):
    assert format_of(source, given) == expected


@pytest.mark.parametrize(
    ("source", "given"),
    [
        ("a.txt", None),
        ("jsonl", None),
        ("a.parquet.gz", None),
        ("", None),
        (".gz", None),
        ("a.jsonl", "xml"),
        ("a", ""),
    ],
)
def test_an_unknown_format_is_an_error_that_lists_the_known_ones(source, given):
    with pytest.raises(BulkInputError, match=r"Known are \.jsonl, .*\.parquet"):
        format_of(source, given)


def test_a_format_is_printed_as_it_is_given():
    assert format_of("x", str(Format("jsonl", "gz"))) == Format("jsonl", "gz")
    assert Format("arrow").extension == ".arrow"


WITHOUT_THE_EXTRA = """
import sys
sys.modules["pyarrow"] = sys.modules["zstandard"] = None
from pathlib import Path
from trio_pool_serve.runs.tables.input_table import open_input
from trio_pool_serve.runs.tables.output_rows import OutputColumn
from trio_pool_serve.runs.tables.output_table import open_output
from trio_pool_serve.runs.tables.table_formats import format_of
from trio_pool_serve.errors import BulkInputError
folder = Path(sys.argv[1])
for name in ("a.jsonl", "a.jsonl.gz", "a.csv", "a.csv.gz", "a.jsonl.zst", "a.parquet", "a.arrow"):
    path = folder / name
    try:
        output = open_output(path, format_of(path), [OutputColumn("text", "string")], None)
        output.write([("a text",)])
        output.finish()
        output.close()
    except BulkInputError as error:
        print(name, "written:", error)
        path.write_bytes(b"x")
    try:
        print(name, [row.values for row in open_input(str(path)).rows(["text"], None)])
    except BulkInputError as error:
        print(name, "read:", error)
"""


def test_jsonl_and_csv_work_without_the_extra_and_the_others_say_what_to_install(tmp_path):
    command = [sys.executable, "-c", WITHOUT_THE_EXTRA, str(tmp_path)]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    plain = ("a.jsonl", "a.jsonl.gz", "a.csv", "a.csv.gz")
    install = "needs the extra [bulk]: pip install trio-pool-serve[bulk]"
    assert printed == [f"{name} [('a text',)]" for name in plain] + [
        f"a.jsonl.zst written: Writing .zst files {install}",
        f"a.jsonl.zst read: Reading .zst files {install}",
        f"a.parquet written: Writing Parquet and Arrow files {install}",
        f"a.parquet read: Reading Parquet and Arrow files {install}",
        f"a.arrow written: Writing Parquet and Arrow files {install}",
        f"a.arrow read: Reading Parquet and Arrow files {install}",
    ]
