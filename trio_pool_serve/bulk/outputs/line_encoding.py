"""Rows as lines of JSON or CSV."""

import csv
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from trio_pool_serve.bulk.outputs.column_arrays import as_written
from trio_pool_serve.bulk.outputs.column_types import ColumnType, NumberType, OutputColumn, SparseType
from trio_pool_serve.bulk.table_formats import Kind

Rows = Sequence[Sequence[Any]]


class LineEncoder:
    """Encodes rows of the same columns as JSON objects, or as cells after RFC 4180 in which lists are JSON."""

    def __init__(self, kind: Kind, columns: Sequence[OutputColumn]) -> None:
        self._columns = columns
        self._delimiter = {"csv": ",", "tsv": "\t"}.get(kind)

    def header(self) -> bytes:
        """Return the line before the rows."""
        return self._cells([[column.name for column in self._columns]]) if self._delimiter else b""

    def lines(self, rows: Rows) -> bytes:
        """Return the lines of rows."""
        if self._delimiter:
            return self._cells([[_cell(column.type, value) for column, value in self._pairs(row)] for row in rows])
        return b"".join([self._object(row) for row in rows])

    def _pairs(self, row: Sequence[Any]) -> list[tuple[OutputColumn, Any]]:
        return list(zip(self._columns, row, strict=True))

    def _object(self, row: Sequence[Any]) -> bytes:
        values = {column.name: _json_value(column.type, value) for column, value in self._pairs(row)}
        return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)

    def _cells(self, rows: list[list[str]]) -> bytes:
        text = io.StringIO()
        csv.writer(text, delimiter=self._delimiter or ",", lineterminator="\r\n").writerows(rows)
        return text.getvalue().encode()


def _json_value(kind: ColumnType, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(kind, NumberType):
        return np.float32(value)  # which is written with the digits that tell it from other float32 numbers
    array = as_written(kind, value)
    if isinstance(kind, SparseType):
        indices, scores = array
        return [{"index": index, "score": score} for index, score in zip(indices.tolist(), scores, strict=True)]
    return array


def _cell(kind: ColumnType, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return orjson.dumps(_json_value(kind, value), option=orjson.OPT_SERIALIZE_NUMPY).decode()
