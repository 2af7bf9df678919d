"""Rows that cannot be used, ids and places, format by format."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.runs.tables.table_files import all_rows, values
from trio_pool_serve.errors import BulkInputError
from trio_pool_serve.runs.tables import input_rows
from trio_pool_serve.runs.tables.input_rows import InputRow
from trio_pool_serve.runs.tables.input_table import open_input

INVALID = "The line is not valid JSON"

LINES = {
    b"": None,
    b" \t": None,
    b'{"id": 7, "text": "good"}': "",
    b"{": INVALID,
    b"[1]": "The line is neither a JSON object nor a JSON string.",
    b"17": "The line is neither a JSON object nor a JSON string.",
    b'{"text": "\xff"}': "The line is not UTF-8.",
    b'{"text": null}': "The column 'text' is null.",
    b'{"body": "x", "id": 1}': "The column 'text' is missing. The columns are: 'body', 'id'.",
    b"{}": "The column 'text' is missing. The columns are: none.",
    b"[" * 100_000: INVALID,
    b'{"text": "\\ud800 and more"}': INVALID,
    b'"a plain string"': "",
    b'{"text": {"any": ["JSON", 1.5]}}': "",
}


def test_each_line_that_cannot_be_used_is_a_row_with_its_reason(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(LINES))  # and none behind the last
    rows = all_rows(path, "text")
    expected = [(line, error) for line, error in enumerate(LINES.values(), 1) if error is not None]
    assert [(row.place, row.error.partition(": ")[0] if INVALID in row.error else row.error) for row in rows] == [
        (f"a.jsonl:{line}", error) for line, error in expected
    ]
    assert [row.number for row in rows] == list(range(len(rows)))
    assert [row.values for row in rows if not row.error] == [("good",), ("a plain string",), ({"any": ["JSON", 1.5]},)]
    assert rows[0].id == 7
    assert rows[-1].id == rows[-1].number


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_a_line_that_is_too_long_is_a_row_and_the_next_ones_are_read(tmp_path, name):
    n = input_rows.MAX_ROW_BYTES
    with (tmp_path / name).open("wb") as file:
        file.writelines(b'"%b"\n' % text for text in (b"text", b"a" * (n - 3), b"b" * (n - 2), b"c" * (2 * n), b"last"))
    rows = [row for row in all_rows(tmp_path / name, "text") if row.values != ("text",)]
    too_long = f"The {'line' if name == 'a.jsonl' else 'row'} exceeds {n} bytes."
    assert [len(row.values[0]) if row.values else row.error for row in rows] == [n - 3, too_long, too_long, 4]
    assert [row.place for row in rows] == [f"{name}:{line}" for line in range(2, 6)]


def test_a_quote_that_is_never_closed_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(input_rows, "MAX_ROW_BYTES", 1000)
    lines = ["text", "first", '"never closed', *["x" * 98] * 20]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    rows = all_rows(tmp_path / "a.csv", "text")
    assert rows[1] == InputRow(1, "a.csv", 1, (), "The row exceeds 1000 bytes.", 3)
    assert [row.values for row in rows[2:]] == [("x" * 98,)] * 10


def test_cells_that_cannot_be_used_are_rows_with_their_reason(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(
        b'\xef\xbb\xbfid,text\r\n1,"a ""quoted"",\r\ncell"\r\n\r\n2\r\n3,b,c\r\n4,\xff\r\n5,"b"ad\r\n6,\r\n7,"open'
    )
    assert [(row.place, row.id, row.values, row.error) for row in all_rows(path, "text")] == [
        ("a.csv:2", "1", ('a "quoted",\r\ncell',), ""),
        ("a.csv:5", 1, (), "The row has 1 cells, but the header has 2."),
        ("a.csv:6", 2, (), "The row has 3 cells, but the header has 2."),
        ("a.csv:7", 3, (), "The row is not UTF-8."),
        ("a.csv:8", 4, (), "The row is not valid CSV: ',' expected after '\"'."),
        ("a.csv:9", "6", ("",), ""),
        ("a.csv:10", 6, (), "The row is not valid CSV: unexpected end of data."),
    ]


@pytest.mark.parametrize("header", [b'"te', b"\xff,text", b"text,text"])
def test_a_header_that_cannot_be_used_is_an_error(tmp_path, header):
    (tmp_path / "a.csv").write_bytes(header + b"\n1,2\n")
    with pytest.raises(BulkInputError, match=r"a\.csv: the header cannot be read|several columns named 'text'"):
        all_rows(tmp_path / "a.csv", "text")


def test_values_of_parquet_that_cannot_be_used_are_rows_with_their_reason(tmp_path, monkeypatch):
    # Bytes under the name of strings, which Arrow does not check.
    texts = pa.array([b"good", None, b"\xff", b"too long for the bound", b"last"]).cast(pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": texts, "key": [1, 2, 3, 4, None]}), tmp_path / "a.parquet")
    monkeypatch.setattr(input_rows, "MAX_ROW_BYTES", 10)
    assert all_rows(tmp_path / "a.parquet", "text", id_column="key") == [
        InputRow(0, "a.parquet", 1, ("good",), at=1),
        InputRow(1, "a.parquet", 2, error="The column 'text' is null.", at=2),
        InputRow(2, "a.parquet", 3, error="The value of the column 'text' is not UTF-8.", at=3),
        InputRow(3, "a.parquet", 4, error="The value of the column 'text' exceeds 10 bytes.", at=4),
        InputRow(4, "a.parquet", 4, error="The column 'key' is null.", at=5),
    ]


def test_an_id_is_a_scalar_that_every_output_can_write(tmp_path):
    lines = ['{"k": "a"}', '{"k": 1.5}', '{"k": true}', f'{{"k": {2**70}}}', '{"k": [1]}', '{"k": null}', "{}", '"x"']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    rows = all_rows(tmp_path / "a.jsonl", id_column="k")
    assert [row.id for row in rows[:4]] == ["a", 1.5, True, str(2**70)]
    assert [row.error for row in rows[4:]] == [
        "The column 'k' is a list or an object, not an id.",
        "The column 'k' is null.",
        "The column 'k' is missing. The columns are: none.",
        "The line is a JSON string; it must be an object with 'k'.",
    ]


def test_without_an_id_column_an_unusable_id_is_the_number(tmp_path):
    pq.write_table(pa.table({"id": [float("nan"), 2.0, None], "text": ["a", "b", "c"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"id": [[1], [2], [3]], "text": ["a", "b", "c"]}), tmp_path / "b.parquet")
    (tmp_path / "a.jsonl").write_text('{"id": [1], "text": "a"}\n{"id": null, "text": "b"}\n{"id": "c", "text": "c"}')
    for name, ids in (("a.parquet", [0, 2.0, 2]), ("b.parquet", [0, 1, 2]), ("a.jsonl", [0, 1, "c"])):
        rows = all_rows(tmp_path / name, "text")
        assert values(rows) == ["a", "b", "c"]
        assert [row.id for row in rows] == ids


def test_other_columns_of_parquet_are_not_read(tmp_path):
    """A column whose pages are destroyed does not matter to those who do not ask for it."""
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["a", "b"], "broken": ["x" * 1000, "y" * 1000]})
    pq.write_table(table, path, compression="none", use_dictionary=False)
    chunk = pq.read_metadata(path).row_group(0).column(1)
    content = bytearray(path.read_bytes())
    content[chunk.data_page_offset : chunk.data_page_offset + 20] = b"\xff" * 20
    path.write_bytes(content)
    assert values(all_rows(path, "text")) == ["a", "b"]
    with pytest.raises(BulkInputError):
        all_rows(path, "broken")


def test_a_file_of_json_lines_with_nothing_but_a_byte_order_mark_has_no_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf")
    assert list(open_input(str(path)).rows(("text",), None)) == []
