"""Tables of every format are read the same way."""

import gzip
import os
import shutil
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lanes import sampled
from tests.runs.tables.table_files import FORMATS, LINE_FORMATS, all_rows, printed, values, write_table
from trio_pool_serve.errors import BulkInputError, InputChangedError
from trio_pool_serve.runs.tables.input_table import Fingerprint, InputTable, open_input

ROWS = [{"id": f"r{number}", "text": f"héllo 😀\n{number}", "other": number} for number in range(50)]
COLUMNS = ["id", "text", "other"]

RANDOM = Random(7)

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1)


def ignore(n_bytes: int) -> None:
    pass


def scanned(source) -> tuple[InputTable, Fingerprint]:
    table = open_input(str(source))
    return table, table.scan(ignore)


@pytest.mark.parametrize("kind", FORMATS)
def test_texts_ids_and_numbers_come_back(tmp_path, kind):
    texts = []

    @given(st.lists(TEXTS, max_size=30))
    def check(drawn):
        rows = [{"id": f"r{number}", "text": text, "other": 1} for number, text in enumerate(drawn)]
        read = all_rows(write_table(tmp_path / f"a.{kind}", rows, COLUMNS), "text")
        assert values(read) == drawn
        assert [(row.number, row.id) for row in read] == [(number, f"r{number}") for number in range(len(drawn))]
        texts.extend(drawn)

    check()
    assert any(set('\n\r"\0,') & set(text) for text in texts)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("is_scanned", [False, True])
def test_a_start_skips_rows_of_all_files_and_changes_nothing_else(tmp_path, kind, is_scanned):
    for number, (first, last) in enumerate([(0, 20), (20, 20), (20, 21), (21, 50)]):
        write_table(tmp_path / f"part-{number}.{kind}", ROWS[first:last] or [], COLUMNS)
        if first == last and kind not in LINE_FORMATS:
            (tmp_path / f"part-{number}.{kind}").unlink()  # a table without rows has no types of columns
    table = open_input(str(tmp_path / f"*.{kind}"))
    expected = all_rows(table, "text", "other")
    assert [row.values[0] for row in expected] == [row["text"] for row in ROWS]
    assert [row.number for row in expected] == list(range(50))
    if kind not in LINE_FORMATS:
        places = [(0, row) for row in range(1, 21)] + [(2, 1)] + [(3, row) for row in range(1, 30)]
        assert [row.place for row in expected] == [f"part-{part}.{kind}:{row}" for part, row in places]
    if is_scanned:
        assert table.scan(ignore).rows == 50
    for start in (0, 1, 6, 7, 8, 19, 20, 21, 28, 49, 50, 51):
        assert all_rows(table, "text", "other", start=start) == expected[start:]


def test_files_that_were_scanned_and_lie_before_the_start_are_not_opened(tmp_path):
    for number in range(3):
        write_table(tmp_path / f"{number}.jsonl", ROWS[:10], COLUMNS)
    table, _ = scanned(tmp_path / "*.jsonl")
    (tmp_path / "1.jsonl").unlink()
    assert [row.place for row in all_rows(table, "text", start=25)] == [f"2.jsonl:{line}" for line in range(6, 11)]
    with pytest.raises(BulkInputError, match=r"1\.jsonl: No such file"):
        all_rows(table, "text", start=19)


@pytest.mark.parametrize("kind", FORMATS)
def test_scan_reads_every_byte_once_and_counts_rows(tmp_path, kind):
    write_table(tmp_path / f"b.{kind}", ROWS, COLUMNS)
    write_table(tmp_path / f"a.{kind}", ROWS[:20], COLUMNS)
    table = open_input(str(tmp_path / f"?.{kind}"))
    read = []
    fingerprint = table.scan(read.append)
    assert fingerprint.rows == 70
    assert [file.name for file in fingerprint.files] == [f"a.{kind}", f"b.{kind}"]
    assert read == sorted(read)
    assert read[-1] == table.n_bytes == sum(file.n_bytes for file in fingerprint.files)
    assert fingerprint.files[0].blake2b != fingerprint.files[1].blake2b
    assert msgspec.json.decode(msgspec.json.encode(fingerprint), type=Fingerprint) == fingerprint


def test_the_same_content_elsewhere_is_no_change(tmp_path):
    (tmp_path / "before").mkdir()
    write_table(tmp_path / "before" / "a.jsonl", ROWS, COLUMNS)
    shutil.copytree(tmp_path / "before", tmp_path / "after")
    os.utime(tmp_path / "after" / "a.jsonl", ns=(1, 1))
    (_, before), (_, after) = scanned(tmp_path / "before" / "*.jsonl"), scanned(tmp_path / "after" / "*.jsonl")
    assert before != after
    assert before.changes(after) == ""


def test_changes_are_sentences(tmp_path):
    for name in ("kept", "longer", "other", "gone"):
        (tmp_path / f"{name}.jsonl").write_text('"text"\n')
    _, before = scanned(tmp_path)
    (tmp_path / "longer.jsonl").write_text('"text"\n"two"\n')
    (tmp_path / "other.jsonl").write_text('"next"\n')
    (tmp_path / "gone.jsonl").rename(tmp_path / "new.jsonl")
    assert before.changes(scanned(tmp_path)[1]) == (
        "gone.jsonl was removed. new.jsonl was added. longer.jsonl has 13 bytes, but had 7. "
        "The content of other.jsonl has changed."
    )


def test_a_file_that_changes_after_the_scan_is_an_error(tmp_path):
    path = write_table(tmp_path / "a.jsonl", ROWS, COLUMNS)
    table, _ = scanned(path)
    table.check_unchanged()
    for change, message in (
        (lambda: os.utime(path, ns=(1, 1)), "it was written to"),
        (lambda: path.write_bytes(b"{}"), "it has 2 bytes, but had "),
        (path.unlink, r"a\.jsonl can no longer be found: No such file"),
    ):
        change()
        with pytest.raises(InputChangedError, match=message):
            table.check_unchanged()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, kind):
    path = write_table(tmp_path / f"a.{kind}", ROWS * 50, COLUMNS)
    table, _ = scanned(path)
    rows = table.rows(COLUMNS, None)
    next(rows)
    table.check_read()
    os.utime(path, ns=(1, 1))
    for read in (table.check_read, lambda: list(rows)):
        with pytest.raises(InputChangedError, match="it was written to"):
            read()


def test_a_file_that_changes_while_it_is_scanned_is_an_error(tmp_path):
    path = write_table(tmp_path / "a.jsonl", ROWS, COLUMNS)

    def grow(n_bytes: int) -> None:
        with path.open("ab") as file:
            file.write(b'"more"\n')
            if file.tell() > 20_000:
                file.truncate(10_000)

    with pytest.raises(InputChangedError):
        open_input(str(path)).scan(grow)


def damaged(content: bytes) -> dict[str, bytes]:
    return {
        "truncated": content[: len(content) * 2 // 3],
        "changed": content[: len(content) // 2] + b"\xff" * 40 + content[len(content) // 2 + 40 :],
        "of something else": b"\x00" * 1000,
    }


WITH_CHECKSUMS = ["jsonl.gz", "csv.zst", "tsv.gz", "jsonl.zst", "parquet"]


@pytest.mark.parametrize(
    ("kind", "damage"),
    [(kind, damage) for kind in WITH_CHECKSUMS for damage in damaged(b"")]
    + [(kind, damage) for kind in ("arrow", "stream.arrow") for damage in ("truncated", "of something else")],
)
def test_a_damaged_file_is_one_error_with_its_name(tmp_path, kind, damage):
    rows = [{"id": number, "text": RANDOM.randbytes(500).hex(), "other": 0} for number in range(1000)]
    path = write_table(tmp_path / f"a.{kind}", rows, COLUMNS, group=1000)
    path.write_bytes(damaged(path.read_bytes())[damage])
    with pytest.raises(BulkInputError, match=r"^a\."):
        all_rows(path, "id", "text")
    if kind != "parquet" or damage != "changed":  # whose rows are counted from its end
        with pytest.raises(BulkInputError, match=r"^a\."):
            scanned(path)


def test_garbage_behind_gzip_members_is_an_error(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'"one"\n') + b"garbage")
    with pytest.raises(BulkInputError, match=r"a\.jsonl\.gz: Not a gzipped file"):
        all_rows(path, "text")


@pytest.mark.parametrize("kind", FORMATS)
def test_an_empty_file_is_no_rows_of_json_lines_and_an_error_of_other_formats(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    path.write_bytes(b"")
    if kind.startswith("jsonl"):
        assert all_rows(path, "text") == []
    else:
        with pytest.raises(BulkInputError, match=f"^a.{kind}"):
            all_rows(path, "text")


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if not kind.startswith("jsonl")])
@pytest.mark.parametrize(("column", "id_column"), [("body", None), ("text", "body")])
def test_a_missing_column_is_an_error_that_lists_the_columns(tmp_path, kind, column, id_column):
    path = write_table(tmp_path / f"a.{kind}", ROWS, COLUMNS)
    with pytest.raises(
        BulkInputError, match=f"a.{kind} contains no column 'body'. Its columns are: 'id', 'text', 'other'"
    ):
        all_rows(path, column, id_column=id_column)


STDIN_READER = """
import sys
from trio_pool_serve.runs.tables.input_table import open_input
from trio_pool_serve.errors import BulkInputError
table = open_input("-", format=sys.argv[1])
print(table.scan(print), table.n_bytes, table.is_stdin)
print([(row.place, row.values) for row in table.rows(["text"], None, 1)])
try:
    next(table.rows(["text"], None))
except BulkInputError as error:
    print(error)
"""


@sampled("kind", LINE_FORMATS, keep=["jsonl", "csv.gz"])
def test_standard_input_is_read_once_and_not_scanned(tmp_path, kind):
    path = write_table(tmp_path / f"a.{kind}", [{"text": "one"}, {"text": "two"}], ["text"])
    line = 2 if kind.startswith("jsonl") else 3
    assert printed(STDIN_READER, kind, input=path.read_bytes()).decode().splitlines() == [
        "Fingerprint(files=(), rows=None) None True",
        f"[('standard input:{line}', ('two',))]",
        "Standard input can be read only once.",
    ]


MEMORY = """
import sys
from trio_pool_serve.runs.tables.input_table import open_input
for module in ("pyarrow.parquet", "zstandard"):
    __import__(module)
table = open_input(sys.argv[1])
from tests.runs.tables.table_files import peak_kib
before = peak_kib()
n = sum(1 for row in table.rows(["text"], None))
assert n == int(sys.argv[2]), n
print(peak_kib() - before)
"""


@sampled("kind", ["jsonl", "csv.gz", "jsonl.zst", "parquet", "arrow", "stream.arrow"], keep=["parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path, kind):
    """For Parquet with all rows in one row group. The table in memory would be ten times as large, 38 MB."""
    grown = []
    for n_rows in (7_500, 75_000):
        rows = [{"text": f"{number} {os.urandom(250).hex()}"} for number in range(n_rows)]
        path = write_table(tmp_path / f"a.{kind}", rows, ["text"], n_rows if kind == "parquet" else 1000)
        grown.append(int(printed(MEMORY, path, n_rows)))
    assert grown[1] < grown[0] + 15_000
