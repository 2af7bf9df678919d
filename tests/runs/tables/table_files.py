"""Files with tables, written by the packages that most people write them with."""

import csv
import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from trio_pool_serve.runs.tables.input_rows import InputRow
from trio_pool_serve.runs.tables.input_table import InputTable

LINE_FORMATS = [f"{kind}{end}" for kind in ("jsonl", "csv", "tsv") for end in ("", ".gz", ".zst")]
FORMATS = [*LINE_FORMATS, "parquet", "arrow", "stream.arrow", "feather"]

COMPRESSORS = {
    "gz": partial(gzip.compress, compresslevel=1),
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def write_table(path: Path, rows: list[dict[str, Any]], columns: list[str], group: int = 7) -> Path:
    """Write rows in the format of the extension, with ``group`` rows in a row group or record batch."""
    name = path.name.partition(".")[2]
    kind, _, compression = name.partition(".") if name != "stream.arrow" else (name, "", "")
    if kind in {"jsonl", "csv", "tsv"}:
        content = _json_lines(rows) if kind == "jsonl" else _csv(path, rows, columns, "\t" if kind == "tsv" else ",")
        # In two members, as files that were appended to have them.
        halves = [content[: len(content) // 2], content[len(content) // 2 :]]
        path.write_bytes(b"".join(map(COMPRESSORS.get(compression, bytes), halves)))
        return path
    table = pa.table({column: [row[column] for row in rows] for column in columns})
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=group, write_page_checksum=True)
    elif kind == "stream.arrow":
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=group)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=group)
    return path


def _json_lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _csv(path: Path, rows: list[dict[str, Any]], columns: list[str], delimiter: str) -> bytes:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(columns)
        writer.writerows([[row[column] for column in columns] for row in rows])
    return path.read_bytes()


def all_rows(table: InputTable, *columns: str, id_column: str | None = None, start: int = 0) -> list[InputRow]:
    return list(table.rows(columns, id_column, start))


def peak_kib() -> int:
    """Return the most memory that this process has had; ``getrusage`` has the parent's from before exec, too."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def values(rows: list[InputRow]) -> list[Any]:
    assert [row.error for row in rows if row.error] == []
    return [row.values[0] if len(row.values) == 1 else row.values for row in rows]
