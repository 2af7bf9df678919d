"""Rows of an output: results, the types of columns, and rows as lines or as record batches of Arrow."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import orjson
from attrs import frozen

from trio_pool_serve.errors import BulkRowError
from trio_pool_serve.runs.run import OnError
from trio_pool_serve.runs.tables.input_rows import InputRow
from trio_pool_serve.runs.tables.table_formats import Kind, import_extra

Rows: TypeAlias = Sequence[Sequence[Any]]
"""Rows with a value or None for each column."""

ColumnType: TypeAlias = Literal["string", "number", "numbers", "vector", "vectors", "sparse"]
"""The type of a column's values; a row without a result has None.

string: a ``str``, or for ids any JSON scalar; in Arrow a string. number: written as float32. numbers: an array or list
of any length, written as float32. vector: an array ``[length]``; in Arrow a list of fixed size, in text a list.
vectors: an array ``[n, length]``, where n differs between rows: one vector for each token. sparse: a pair of arrays,
indices and scores; in files a list of ``{index: int32, score: float32}``.
"""

VectorDtype: TypeAlias = Literal["float32", "float16", "int8", "uint8"]

WRITING_ARROW = "Writing Parquet and Arrow files"

SPARSE_ITEM = np.dtype([("index", np.int32), ("score", np.float32)])


@frozen
class OutputColumn:
    """A column by its name in the file; ``length`` and ``dtype`` are for vectors."""

    name: str
    type: ColumnType
    length: int = 0
    dtype: VectorDtype = "float32"


class RowResult(msgspec.Struct, frozen=True):
    """The values of the output's columns for a row, after the id; or the error it failed with."""

    values: tuple[Any, ...] = ()
    error: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether there is an error."""
        return bool(self.error)


def divided(
    on_error: OnError, nulls: tuple[None, ...], rows: Sequence[InputRow], results: Sequence[RowResult]
) -> tuple[list[tuple[object, ...]], list[bytes]]:
    """Return the rows of the output, and the lines for the file of errors, as ``on_error`` decides.

    ``nulls`` are the values of a failed row, after its id. Raises ``BulkRowError`` for a failed row if ``on_error`` is
    ``fail``.
    """
    written: list[tuple[object, ...]] = []
    errors: list[bytes] = []
    for row, result in zip(rows, results, strict=True):
        if result.error and on_error == "fail":
            raise BulkRowError(f"{row.place}, id {row.id!r}: {result.error}")
        if result.error:
            errors.append(msgspec.json.encode({"line": row.place, "id": row.id, "reason": result.error}) + b"\n")
        if not result.error or on_error == "null":
            written.append((row.id, *(nulls if result.error else result.values)))
    return written, errors


def size_of(row: Sequence[Any]) -> int:
    """Return about how many bytes the values of a row have in memory."""
    values = [part for value in row for part in (value if isinstance(value, tuple) else (value,))]
    return sum(len(value) if isinstance(value, str) else getattr(value, "nbytes", 8) for value in values)


def json_lines(columns: Sequence[OutputColumn], rows: Rows) -> bytes:
    """Return rows as lines of JSON objects."""
    return b"".join(
        [
            orjson.dumps(
                {
                    of.name: None if value is None else _json_value(of, value)
                    for of, value in zip(columns, row, strict=True)
                },
                option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE,
            )
            for row in rows
        ]
    )


def cell_lines(columns: Sequence[OutputColumn], rows: Rows, delimiter: str) -> bytes:
    """Return rows as lines of cells after RFC 4180, in which lists are JSON."""
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\r\n")
    writer.writerows([[_text(*pair) for pair in zip(columns, row, strict=True)] for row in rows])
    return text.getvalue().encode()


LINES_OF: Mapping[Kind, Callable[[Sequence[OutputColumn], Rows], bytes]] = {
    "jsonl": json_lines,
    "csv": partial(cell_lines, delimiter=","),
    "tsv": partial(cell_lines, delimiter="\t"),
}


class BatchBuilder:
    """Makes record batches of the same columns, without a Python object for each number.

    Columns of arrays are made from one array of all rows: Arrow takes four times as long for a list of arrays.
    """

    def __init__(self, columns: Sequence[OutputColumn]) -> None:
        self._arrow = import_extra("pyarrow", WRITING_ARROW)
        self._columns = columns
        self.schema = self._arrow.schema([(column.name, self._type(column)) for column in columns])

    def batch(self, rows: Rows) -> Any:
        """Return a ``pyarrow.RecordBatch``."""
        arrays = [
            self._array(column, [row[index] for row in rows], self.schema.field(index).type)
            for index, column in enumerate(self._columns)
        ]
        return self._arrow.record_batch(arrays, schema=self.schema)

    def _type(self, column: OutputColumn) -> Any:
        arrow = self._arrow
        vector = arrow.list_(arrow.from_numpy_dtype(np.dtype(column.dtype)), column.length)
        return {
            "string": arrow.string(),
            "number": arrow.float32(),
            "numbers": arrow.list_(arrow.float32()),
            "vector": vector,
            "vectors": arrow.list_(vector),
            "sparse": arrow.list_(arrow.struct([("index", arrow.int32()), ("score", arrow.float32())])),
        }[column.type]

    def _array(self, column: OutputColumn, values: list[Any], arrow_type: Any) -> Any:
        if column.type == "string":
            return self._arrow.array([_text(column, value) for value in values], arrow_type)
        values = [None if value is None else WRITTEN[column.type](column, value) for value in values]
        if column.type == "vector":
            return self._vectors(column, values, arrow_type)
        if column.type in ("vectors", "sparse"):
            return self._lists(column, values, arrow_type)
        return self._arrow.array(values, arrow_type)

    def _vectors(self, column: OutputColumn, arrays: list[Any], arrow_type: Any) -> Any:
        null = np.zeros(column.length, column.dtype)
        flat = np.concatenate([null[:0], *[null if array is None else array for array in arrays]])
        nulls = self._arrow.array([array is None for array in arrays], self._arrow.bool_())
        return self._arrow.FixedSizeListArray.from_arrays(self._arrow.array(flat), type=arrow_type, mask=nulls)

    def _lists(self, column: OutputColumn, arrays: list[Any], arrow_type: Any) -> Any:
        found = [array for array in arrays if array is not None]
        if not found:
            return self._arrow.nulls(len(arrays), arrow_type)
        offsets = np.cumsum([0, *(0 if array is None else len(array) for array in arrays)], dtype=np.int32)
        flat = np.concatenate(found)
        if column.type == "sparse":
            fields = [self._arrow.array(flat[name]) for name in SPARSE_ITEM.fields or ()]
            items = self._arrow.StructArray.from_arrays(fields, fields=list(arrow_type.value_type))
        else:
            numbers = self._arrow.array(flat.reshape(-1))
            items = self._arrow.FixedSizeListArray.from_arrays(numbers, type=arrow_type.value_type)
        nulls = self._arrow.array([array is None for array in arrays])
        return self._arrow.ListArray.from_arrays(self._arrow.array(offsets), items, type=arrow_type, mask=nulls)


def _json_value(column: OutputColumn, value: Any) -> Any:
    written = WRITTEN[column.type](column, value)
    if column.type == "sparse":
        pairs = zip(written["index"].tolist(), written["score"], strict=True)
        return [{"index": index, "score": score} for index, score in pairs]
    return written


def _text(column: OutputColumn, value: Any) -> str | None:
    """Return a string as it is, and other values as JSON."""
    if value is None or isinstance(value, str):
        return value
    return orjson.dumps(_json_value(column, value), option=orjson.OPT_SERIALIZE_NUMPY).decode()


def _shaped(value: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    array = np.ascontiguousarray(value, dtype)
    if array.shape != shape:
        raise ValueError(f"An array has the shape {array.shape}; {shape} was expected.")
    return array


def _items(_: OutputColumn, value: tuple[Any, Any]) -> Any:
    indices, scores = value
    items = np.empty(len(indices), SPARSE_ITEM)
    items["index"], items["score"] = indices, _shaped(scores, "float32", (len(indices),))
    return items


WRITTEN: Mapping[ColumnType, Callable[[OutputColumn, Any], Any]] = {
    "string": lambda _, value: value,
    "number": lambda _, value: np.float32(value),  # JSON gets the fewest digits that identify a float32
    "numbers": lambda _, value: np.ascontiguousarray(value, np.float32),
    "vector": lambda column, value: _shaped(value, column.dtype, (column.length,)),
    "vectors": lambda column, value: _shaped(value, column.dtype, (len(value), column.length)),
    "sparse": _items,
}
"""Returns a value as it is written: a contiguous array, a float32, or a string or id as it is.

Raises ``ValueError`` for an array of another shape.
"""
