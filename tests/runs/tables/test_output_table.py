"""Tables of every format are written so that they can be cut off at a commit and continued."""

import csv
import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.lanes import sampled
from tests.runs.tables.table_files import LINE_FORMATS, all_rows, printed, values
from tests.server.server_process import ROOT
from trio_pool_serve.errors import BulkInputError, StorageError
from trio_pool_serve.runs.run import Position
from trio_pool_serve.runs.tables import output_table
from trio_pool_serve.runs.tables.input_table import open_input
from trio_pool_serve.runs.tables.output_rows import OutputColumn
from trio_pool_serve.runs.tables.output_table import OutputTable, open_output
from trio_pool_serve.runs.tables.table_formats import format_of

FOLDER_FORMATS = ["parquet", "arrow"]
FORMATS = [*LINE_FORMATS, *FOLDER_FORMATS]

of_each_format = pytest.mark.parametrize("kind", FORMATS)

COLUMNS = [OutputColumn("id", "string"), OutputColumn("text", "string"), OutputColumn("vector", "vector", 3)]
START, END = Position(), Position(is_finished=True)


def opened(path: Path, position: Position = START, columns=COLUMNS) -> OutputTable:
    return open_output(path, format_of(path), columns, position)


def row(number: int) -> tuple:
    return (f"r{number}", f'text {number}\r\n"😀\0', None if number % 7 == 3 else np.full(3, number / 10, np.float32))


def rows(first: int, last: int) -> list[tuple]:
    return [row(number) for number in range(first, last)]


def content(path: Path) -> dict[str, bytes]:
    files = path.iterdir() if path.is_dir() else [path]
    return {file.name: file.read_bytes() for file in files}


def finish(output: OutputTable, *writes: list[tuple]) -> None:
    for some in writes:
        output.write(some)
    output.commit(END)
    output.close()


def written(path: Path, *writes: list[tuple], columns=COLUMNS) -> Path:
    finish(opened(path, columns=columns), *writes)
    return path


@of_each_format
def test_what_is_written_is_what_open_input_reads(tmp_path, kind):
    @given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1), max_size=25))
    def check(texts):
        path = tmp_path / f"out.{kind}"
        written(path, [(number, text, np.zeros(3, np.float32)) for number, text in enumerate(texts)])
        table = open_input(str(path))
        read = all_rows(table, "text")
        assert values(read) == texts
        assert [str(row.id) for row in read] == [str(number) for number in range(len(texts))]
        assert table.scan(lambda n_bytes: None).rows == len(texts)

    check()


@of_each_format
def test_a_run_that_is_cut_off_and_resumed_any_number_of_times_writes_the_same_bytes(tmp_path, kind):
    """Rows are written in writes of any size; after some there is a commit; after some commits, a crash."""
    steps = st.lists(st.tuples(st.integers(0, 15), st.booleans(), st.integers(0, 20)), max_size=12)
    crashes = []

    @given(steps)
    def check(steps):
        path, plain = tmp_path / f"out.{kind}", tmp_path / f"plain.{kind}"
        for target in (path, plain):
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        output, uninterrupted = opened(path), opened(plain)
        committed, done = START, 0
        for n_rows, crash, lost in steps:
            for target in (output, uninterrupted):
                target.write(rows(done, done + n_rows))
            committed = output.commit(START)
            uninterrupted.commit(START)
            done += n_rows
            if crash:
                crashes.append(lost)
                output.write(rows(done, done + lost))
                if lost % 2:
                    output.commit(START)  # which the journal has not seen
                output.close()
                output = opened(path, committed)
        for target in (output, uninterrupted):
            finish(target, rows(done, done + 4))
        assert list(content(path).values()) == list(content(plain).values())
        assert values(all_rows(path, "text")) == [row(number)[1] for number in range(done + 4)]

    check()
    assert len(crashes) > 50


@of_each_format
def test_bytes_do_not_depend_on_how_rows_are_divided_among_writes(tmp_path, kind):
    every = [(number, os.urandom(200).hex(), None) for number in range(3000)]  # more than a piece of a compressor
    one = written(tmp_path / f"one.{kind}", every)
    many = written(tmp_path / f"many.{kind}", *[every[at : at + 7] for at in range(0, 3000, 7)])
    assert list(content(one).values()) == list(content(many).values())


@of_each_format
def test_what_was_committed_and_is_gone_or_shorter_is_an_error_and_else_stays_as_it_is(tmp_path, kind):
    path = tmp_path / f"out.{kind}"
    output = opened(path)
    for first, last in ((0, 10), (10, 25)):
        output.write(rows(first, last))
        committed = output.commit(END)
    output.close()
    file = path if path.is_file() else path / f"part-00001.{kind}"
    before, whole = content(path), file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(StorageError, match="has been changed"):
        opened(path, committed)
    file.unlink()
    with pytest.raises(StorageError, match="has been deleted"):
        opened(path, committed)
    file.write_bytes(whole)
    opened(path, committed).close()
    assert content(path) == before


@of_each_format
def test_a_new_output_replaces_an_earlier_one(tmp_path, kind):
    path = written(tmp_path / f"out.{kind}", rows(0, 45))
    written(path, rows(50, 62))
    (tmp_path / "new").mkdir()
    assert content(path) == content(written(tmp_path / "new" / f"out.{kind}", rows(50, 62)))


@of_each_format
def test_a_table_without_rows_can_be_read(tmp_path, kind):
    path = written(tmp_path / f"out.{kind}")
    assert all_rows(path, "text") == []
    files = [path] if path.is_file() else list(path.iterdir())
    assert len(files) == 1
    assert files[0].stat().st_size or kind == "jsonl"  # gunzip refuses files without a member


@of_each_format
def test_a_full_disk_is_an_error_and_what_was_committed_can_be_continued(small_disk, tmp_path, kind):
    path = small_disk / f"out.{kind}"
    text = [OutputColumn("text", "string")]
    output = opened(path, columns=text)
    output.write([("committed",)] * 20)
    committed = output.commit(START)
    filler = [(os.urandom(50_000).hex(),) for _ in range(60)]
    with pytest.raises(StorageError, match=f"{path}.*: No space left on device"):
        output.write(filler)
        output.commit(START)
    output.close()
    finish(opened(path, committed, text), [("more",)])
    assert values(all_rows(path, "text")) == ["committed"] * 20 + ["more"]


def test_a_folder_that_may_not_be_written_to_is_an_error(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for name in ("out.jsonl", "out.parquet"):
        with pytest.raises(StorageError, match=f"{small_disk}/{name}: Read-only file system"):
            opened(small_disk / name)


# -- folders of parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FOLDER_FORMATS)
def test_a_part_has_the_rows_of_one_commit_and_a_resume_removes_only_its_own_files(tmp_path, kind):
    path = tmp_path / f"out.{kind}"
    output, commits = opened(path), []
    for first in (0, 10, 20, 30):
        output.write(rows(first, first + 10))
        commits.append(output.commit(START))
    output.commit(START)  # of no rows
    assert sorted(content(path)) == [f"part-{number:05d}.{kind}" for number in range(4)]
    assert [ds.dataset(path / name, format=kind).count_rows() for name in content(path)] == [10] * 4
    assert ds.dataset(path, format=kind).to_table()["id"].to_pylist() == [row[0] for row in rows(0, 40)]
    output.write(rows(40, 1101))
    assert sorted(content(path))[-1] == f"part-00004.{kind}.tmp"
    output.close()
    foreign = ["notes.txt", "part-00002.csv", "part-00099.txt.tmp", "part-1.parquet"]
    for name in foreign:
        (path / name).write_text("mine")
    for number in (0, 50):
        (path / f"part-{number:05d}.{kind}.tmp").write_text("not mine")
    opened(path, commits[1]).close()
    assert sorted(content(path)) == sorted([f"part-00000.{kind}", f"part-00001.{kind}", *foreign])
    with pytest.raises(BulkInputError, match=r"contains other files \(notes.txt\)"):
        opened(path)
    assert len(content(path)) == 6


def test_row_groups_are_bounded_in_rows_and_bytes(tmp_path):
    columns = [OutputColumn("vectors", "vectors", 128)]
    many = [(np.zeros((2000, 128), np.float32),)] * 40  # of 1 MB each
    path = written(tmp_path / "out.parquet", many, [(None,)] * 3000, columns=columns)
    metadata = pq.read_metadata(path / "part-00000.parquet")
    groups = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    assert groups == [17, 17, 6 + 1018, 1024, 958]
    assert output_table.GROUP_ROWS == 1024


MEMORY = """
import sys
from pathlib import Path
import numpy as np
from tests.runs.tables.test_output_table import END, START, opened
from trio_pool_serve.runs.tables.output_rows import OutputColumn
path, n_rows = Path(sys.argv[1]), int(sys.argv[2])
output = opened(path, columns=[OutputColumn("vector", "vector", 384)])
output.write([(np.zeros(384, np.float32),)] * 2048)
from tests.runs.tables.table_files import peak_kib
before = peak_kib()
random = np.random.default_rng(0)
for _ in range(n_rows // 500):
    output.write([(vector,) for vector in random.random((500, 384), np.float32)])
    if path.suffix == ".zst":
        output.commit(START)  # as a run does after each window
output.commit(END)
output.close()
print(peak_kib() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl.zst"])
def test_memory_does_not_grow_with_the_output(tmp_path, kind):
    """Of 40,000 vectors in one file, which are 61 MB. Lines are kept until their commit."""
    grown = [int(printed(MEMORY, tmp_path / f"out.{kind}", n_rows)) for n_rows in (4_000, 40_000)]
    assert grown[1] < grown[0] + 20_000


# -- types ----------------------------------------------------------------------------------------------

NUMBERS = np.array([0.1, 1e-7, 3.0], np.float32)
EVERY_TYPE = {
    "id": (("string",), True, True),
    "text": (("string",), 'a,"b"\n', 'a,"b"\n'),
    "number": (("number",), NUMBERS[0], 0.1),
    "vector": (("vector", 3), NUMBERS, [0.1, 1e-7, 3.0]),
    "half": (("vector", 2, "float16"), np.array([0.5, 65504], np.float16), [0.5, 65504.0]),
    "int8": (("vector", 2, "int8"), np.array([-128, 127], np.int8), [-128, 127]),
    "bits": (("vector", 2, "uint8"), np.array([0, 255], np.uint8), [0, 255]),
    "column": (("vector", 2), np.arange(6, dtype=np.float32).reshape(2, 3)[:, 1], [1.0, 4.0]),
    "numbers": (("numbers",), NUMBERS[:2], [0.1, 1e-7]),
    "vectors": (("vectors", 2, "float16"), np.ones((3, 2), np.float16), [[1.0, 1.0]] * 3),
    "no vectors": (("vectors", 2), np.ones((0, 2), np.float32), []),
    "sparse": (
        ("sparse",),
        (np.array([5, 9]), NUMBERS[:2]),
        [{"index": 5, "score": 0.1}, {"index": 9, "score": 1e-7}],
    ),
}
TYPED = [OutputColumn(name, *case[0]) for name, case in EVERY_TYPE.items()]
TYPED_ROWS = [tuple(case[1] for case in EVERY_TYPE.values()), (None,) * len(TYPED)] * 2


def rounded(value):
    """Numbers as float32, as Arrow has them."""
    if isinstance(value, float):
        return float(np.float32(value))
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", FOLDER_FORMATS)
@pytest.mark.parametrize("order", [1, -1])
def test_every_type_and_null_come_back_from_arrow(tmp_path, kind, order):
    path = written(tmp_path / f"out.{kind}", TYPED_ROWS[::order], columns=TYPED)
    table = ds.dataset(path, format=kind).to_table()
    table.validate(full=True)
    expected = {name: rounded(case[2]) for name, case in EVERY_TYPE.items()} | {"id": "true"}
    assert table.to_pylist() == [expected, dict.fromkeys(EVERY_TYPE)][::order] * 2
    types = {field.name: field.type for field in table.schema}
    assert types["half"] == pa.list_(types["half"].value_field.with_type(pa.float16()), 2)
    assert types["vectors"].value_type.list_size == 2
    assert re.match(r"list<\w+: struct<index: int32, score: float>>", str(types["sparse"]))


def test_every_type_and_null_come_back_from_json_with_the_fewest_digits(tmp_path):
    path = written(tmp_path / "out.jsonl", TYPED_ROWS, columns=TYPED)
    expected = {name: case[2] for name, case in EVERY_TYPE.items()}
    assert [json.loads(line) for line in path.read_text().splitlines()] == [expected, dict.fromkeys(EVERY_TYPE)] * 2


def test_cells_are_texts_or_json_after_rfc_4180(tmp_path):
    path = written(tmp_path / "out.csv", TYPED_ROWS[:2], columns=TYPED)
    content = path.read_bytes()
    assert content.startswith(b"id,text,number")
    assert content.count(b"\r\n") == 3
    header, full, empty = csv.reader(io.StringIO(content.decode(), newline=""))
    assert header == list(EVERY_TYPE)
    cells = dict(zip(header, full, strict=True))
    assert cells.pop("text") == EVERY_TYPE["text"][1]
    assert {name: json.loads(cell) for name, cell in cells.items()} == {name: EVERY_TYPE[name][2] for name in cells}
    assert empty == [""] * len(EVERY_TYPE)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "arrow"])
@pytest.mark.parametrize("value", [np.ones(1, np.float32), np.ones(4, np.float32), np.ones((1, 3), np.float32)])
def test_a_vector_of_another_shape_is_an_error_and_not_repeated_or_cut(tmp_path, kind, value):
    output = opened(tmp_path / f"out.{kind}")
    with pytest.raises(ValueError, match=r"\(3,\) was expected"):
        output.write([("id", "text", value)] * 10)
        output.commit(START)
    output.close()


@pytest.mark.parametrize("kind", ["jsonl.gz", "csv.zst"])
def test_each_commit_ends_a_member_that_other_programs_read(tmp_path, kind):
    path = tmp_path / f"out.{kind}"
    output, lengths = opened(path), []
    for first in (0, 10, 20):
        output.write(rows(first, first + 10))
        lengths.append(output.commit(START).output_bytes)
        assert output.commit(START).output_bytes == lengths[-1]  # nothing new, no new member
    output.close()
    content = path.read_bytes()
    members = [content[start:end] for start, end in zip([0, *lengths], lengths, strict=False)]
    decompress = {"gz": gzip.decompress, "zst": zstandard.ZstdDecompressor().decompress}[path.suffix[1:]]
    assert [decompress(member).count("😀".encode()) for member in members] == [10, 10, 10]
    if kind.endswith("gz"):
        assert {member[:8] for member in members} == {b"\x1f\x8b\x08\x00\x00\x00\x00\x00"}  # no flags, no time


# -- standard output ------------------------------------------------------------------------------------

STDOUT_WRITER = """
import sys
from tests.runs.tables.test_output_table import COLUMNS, END, START, rows
from trio_pool_serve.runs.tables.output_table import open_output
from trio_pool_serve.runs.tables.table_formats import format_of
from trio_pool_serve.errors import PoolServeError
try:
    output = open_output(None, format_of("-", sys.argv[1]), COLUMNS, START)
    for _ in range(int(sys.argv[2])):
        output.write(rows(0, 30))
        output.commit(START)
    output.commit(END)
    output.close()
except PoolServeError as error:
    print(error, file=sys.stderr)
    sys.exit(3)
"""


@sampled("kind", LINE_FORMATS, keep=["csv.gz"])
def test_standard_output_gets_what_a_file_does(tmp_path, kind):
    expected = written(tmp_path / f"out.{kind}", rows(0, 30)).read_bytes()
    assert printed(STDOUT_WRITER, kind, 1) == expected


def test_standard_output_that_is_closed_is_one_clear_error():
    command = [sys.executable, "-c", STDOUT_WRITER, "jsonl", "1000"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline().startswith(b'{"id":"r0"')
        process.stdout.close()
        assert process.stderr.read() == b"The reader of standard output closed it before all rows were written.\n"
        assert process.wait() == 3


def test_parquet_to_standard_output_is_refused():
    with pytest.raises(BulkInputError, match="parquet cannot be written to standard output"):
        open_output(None, format_of("-", "parquet"), COLUMNS, START)
