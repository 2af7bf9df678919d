"""Formats by extension."""

from pathlib import Path

import pytest

from tests.runs.tables.table_files import printed
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
    assert format_of(source, given) == format_of("x", str(expected)) == expected  # printed as it is given


UNKNOWN = [("a.jsonl", "xml"), ("a", ""), *[(name, None) for name in ("a.txt", "jsonl", "a.parquet.gz", "", ".gz")]]


@pytest.mark.parametrize(("source", "given"), UNKNOWN)
def test_an_unknown_format_is_an_error_that_lists_the_known_ones(source, given):
    with pytest.raises(BulkInputError, match=r"(known|accepted): \.jsonl, .*\.parquet"):
        format_of(source, given)


WITHOUT_THE_EXTRA = """
import sys
sys.modules["pyarrow"] = sys.modules["zstandard"] = None
from pathlib import Path
from trio_pool_serve.runs.run import Position
from trio_pool_serve.runs.tables.input_table import open_input
from trio_pool_serve.runs.tables.output_rows import OutputColumn
from trio_pool_serve.runs.tables.output_table import open_output
from trio_pool_serve.runs.tables.table_formats import format_of
from trio_pool_serve.errors import BulkInputError
folder = Path(sys.argv[1])
for name in ("a.jsonl", "a.jsonl.gz", "a.csv", "a.csv.gz", "a.jsonl.zst", "a.parquet", "a.arrow"):
    path = folder / name
    try:
        output = open_output(path, format_of(path), [OutputColumn("text", "string")], Position(is_finished=True))
        output.write([("a text",)])
        output.commit(Position(is_finished=True))
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
    expected = [f"{name} [('a text',)]" for name in ("a.jsonl", "a.jsonl.gz", "a.csv", "a.csv.gz")]
    for name, files in (("a.jsonl.zst", ".zst"), ("a.parquet", "Parquet and Arrow"), ("a.arrow", "Parquet and Arrow")):
        for tried, doing in (("written", "Writing"), ("read", "Reading")):
            needs = (
                "requires more packages. Install the extra `bulk`: pip install 'trio-pool-serve[bulk]', "
                "or in a clone: pip install --editable '.[bulk]'."
            )
            expected.append(f"{name} {tried}: {doing} {files} files {needs}")
    assert printed(WITHOUT_THE_EXTRA, tmp_path).decode().splitlines() == expected
