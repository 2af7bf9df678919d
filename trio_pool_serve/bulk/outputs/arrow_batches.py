"""Rows as record batches of Arrow, without a Python object for each number."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from trio_pool_serve.bulk.outputs.column_types import (
    ColumnType,
    NumberListType,
    NumberType,
    OutputColumn,
    SparseType,
    VectorListType,
    VectorType,
    as_written,
)
from trio_pool_serve.bulk.table_formats import import_extra

PURPOSE = "Writing Parquet and Arrow files"


class BatchBuilder:
    """Makes record batches of the same columns."""

    def __init__(self, columns: Sequence[OutputColumn]) -> None:
        self._arrow = import_extra("pyarrow", PURPOSE)
        self._columns = columns
        self.schema = self._arrow.schema([(column.name, self._type(column.type)) for column in columns])

    def batch(self, rows: Sequence[Sequence[Any]]) -> Any:
        """Return a ``pyarrow.RecordBatch``."""
        arrays = []
        for index, column in enumerate(self._columns):
            values = [row[index] for row in rows]
            arrays.append(self._array(column.type, values, self.schema.field(index).type))
        return self._arrow.record_batch(arrays, schema=self.schema)

    def _type(self, kind: ColumnType) -> Any:
        arrow = self._arrow
        match kind:
            case NumberType():
                return arrow.float32()
            case NumberListType():
                return arrow.list_(arrow.float32())
            case VectorType(length, dtype):
                return arrow.list_(arrow.from_numpy_dtype(np.dtype(dtype)), length)
            case VectorListType(length, dtype):
                return arrow.list_(self._type(VectorType(length, dtype)))
            case SparseType():
                return arrow.list_(arrow.struct([("index", arrow.int32()), ("score", arrow.float32())]))
        return arrow.string()

    def _array(self, kind: ColumnType, values: list[Any], arrow_type: Any) -> Any:
        match kind:
            case NumberType():
                return self._arrow.array([None if value is None else float(value) for value in values], arrow_type)
            case VectorType(length, dtype):
                return self._vectors(kind, values, np.zeros((len(values), length), dtype), arrow_type)
            case NumberListType() | VectorListType() | SparseType():
                return self._lists(kind, values, arrow_type)
        return self._arrow.array([_string(value) for value in values], arrow_type)

    def _vectors(self, kind: VectorType, values: list[Any], matrix: np.ndarray, arrow_type: Any) -> Any:
        for index, value in enumerate(values):
            if value is not None:
                matrix[index] = as_written(kind, value)
        flat = self._arrow.array(matrix.reshape(-1))
        return self._arrow.FixedSizeListArray.from_arrays(flat, type=arrow_type, mask=self._nulls(values))

    def _lists(self, kind: ColumnType, values: list[Any], arrow_type: Any) -> Any:
        arrays = [as_written(kind, value) for value in values if value is not None]
        lengths = iter([len(array[0]) if isinstance(kind, SparseType) else len(array) for array in arrays])
        offsets = np.zeros(len(values) + 1, np.int32)
        offsets[1:] = np.cumsum([0 if value is None else next(lengths) for value in values], dtype=np.int64)
        items = self._items(kind, arrays, arrow_type.value_type)
        nulls = self._nulls(values)
        return self._arrow.ListArray.from_arrays(self._arrow.array(offsets), items, type=arrow_type, mask=nulls)

    def _items(self, kind: ColumnType, arrays: list[Any], item_type: Any) -> Any:
        if not arrays:
            return self._arrow.array([], item_type)
        if isinstance(kind, SparseType):
            parts = [self._arrow.array(np.concatenate(column)) for column in zip(*arrays, strict=True)]
            return self._arrow.StructArray.from_arrays(parts, fields=list(item_type))
        flat = np.concatenate(arrays)
        if isinstance(kind, VectorListType):
            return self._arrow.FixedSizeListArray.from_arrays(self._arrow.array(flat.reshape(-1)), type=item_type)
        return self._arrow.array(flat)

    def _nulls(self, values: list[Any]) -> Any:
        nulls = [value is None for value in values]
        return self._arrow.array(nulls) if any(nulls) else None


def _string(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else orjson.dumps(value).decode()
