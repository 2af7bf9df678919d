"""Files with tables, written by the packages that most people write them with."""

import csv
import gzip
import io
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from tests.server.server_process import ROOT
from trio_pool_serve.runs.tables.input_rows import InputRow
from trio_pool_serve.runs.tables.input_table import InputTable, open_input

LINE_FORMATS = [f"{kind}{end}" for kind in ("jsonl", "csv", "tsv") for end in ("", ".gz", ".zst")]
FORMATS = [*LINE_FORMATS, "parquet", "arrow", "stream.arrow", "feather"]

COMPRESSORS = {
    "": bytes,
    "gz": partial(gzip.compress, compresslevel=1),
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def write_table(path: Path, rows: list[dict[str, Any]], columns: list[str], group: int = 7) -> Path:
    """Write rows in the format of the extension, with ``group`` rows in a row group or record batch."""
    name = path.name.partition(".")[2]
    kind, _, compression = name.partition(".")
    if name in LINE_FORMATS:
        content = _lines(kind, rows, columns)
        # In two members, as files that were appended to have them.
        halves = [content[: len(content) // 2], content[len(content) // 2 :]]
        path.write_bytes(b"".join(map(COMPRESSORS[compression], halves)))
        return path
    table = pa.table({column: [row[column] for row in rows] for column in columns})
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=group, write_page_checksum=True)
        return path
    with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=group)
    return path


def _lines(kind: str, rows: list[dict[str, Any]], columns: list[str]) -> bytes:
    if kind == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter="\t" if kind == "tsv" else ",")
    writer.writerows([columns, *[[row[column] for column in columns] for row in rows]])
    return text.getvalue().encode()


def all_rows(table: InputTable | Path, *columns: str, id_column: str | None = None, start: int = 0) -> list[InputRow]:
    """Return the rows of a table, or of the file at a path."""
    table = open_input(str(table)) if isinstance(table, Path) else table
    return list(table.rows(columns, id_column, start))


def values(rows: list[InputRow]) -> list[Any]:
    assert [row.error for row in rows if row.error] == []
    return [row.values[0] if len(row.values) == 1 else row.values for row in rows]


def printed(program: str, *arguments: object, **options: Any) -> bytes:
    """Return what a program in Python prints."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, **options).stdout


def peak_kib() -> int:
    """Return the most memory that this process has had; ``getrusage`` has the parent's from before exec, too."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
