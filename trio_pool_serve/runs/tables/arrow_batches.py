"""Rows as record batches of Arrow, without a Python object for each number."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from trio_pool_serve.runs.tables.column_types import OutputColumn, as_written
from trio_pool_serve.runs.tables.table_formats import import_extra

PURPOSE = "Writing Parquet and Arrow files"


class BatchBuilder:
    """Makes record batches of the same columns."""

    def __init__(self, columns: Sequence[OutputColumn]) -> None:
        self._arrow = import_extra("pyarrow", PURPOSE)
        self._columns = columns
        self.schema = self._arrow.schema([(column.name, self._type(column)) for column in columns])

    def batch(self, rows: Sequence[Sequence[Any]]) -> Any:
        """Return a ``pyarrow.RecordBatch``."""
        arrays = []
        for index, column in enumerate(self._columns):
            values = [row[index] for row in rows]
            arrays.append(self._array(column, values, self.schema.field(index).type))
        return self._arrow.record_batch(arrays, schema=self.schema)

    def _type(self, column: OutputColumn) -> Any:
        arrow = self._arrow
        match column.type:
            case "string":
                return arrow.string()
            case "number":
                return arrow.float32()
            case "numbers":
                return arrow.list_(arrow.float32())
            case "sparse":
                return arrow.list_(arrow.struct([("index", arrow.int32()), ("score", arrow.float32())]))
        vector = arrow.list_(arrow.from_numpy_dtype(np.dtype(column.dtype)), column.length)
        return vector if column.type == "vector" else arrow.list_(vector)

    def _array(self, column: OutputColumn, values: list[Any], arrow_type: Any) -> Any:
        match column.type:
            case "string":
                return self._arrow.array([_string(value) for value in values], arrow_type)
            case "number":
                return self._arrow.array([None if value is None else float(value) for value in values], arrow_type)
            case "vector":
                return self._vectors(column, values, arrow_type)
        return self._lists(column, values, arrow_type)

    def _vectors(self, column: OutputColumn, values: list[Any], arrow_type: Any) -> Any:
        matrix = np.zeros((len(values), column.length), column.dtype)
        for index, value in enumerate(values):
            if value is not None:
                matrix[index] = as_written(column, value)
        flat = self._arrow.array(matrix.reshape(-1))
        return self._arrow.FixedSizeListArray.from_arrays(flat, type=arrow_type, mask=self._nulls(values))

    def _lists(self, column: OutputColumn, values: list[Any], arrow_type: Any) -> Any:
        arrays = [as_written(column, value) for value in values if value is not None]
        lengths = iter([len(array[0]) if column.type == "sparse" else len(array) for array in arrays])
        offsets = np.zeros(len(values) + 1, np.int32)
        offsets[1:] = np.cumsum([0 if value is None else next(lengths) for value in values], dtype=np.int64)
        items = self._items(column, arrays, arrow_type.value_type)
        nulls = self._nulls(values)
        return self._arrow.ListArray.from_arrays(self._arrow.array(offsets), items, type=arrow_type, mask=nulls)

    def _items(self, column: OutputColumn, arrays: list[Any], item_type: Any) -> Any:
        if not arrays:
            return self._arrow.array([], item_type)
        if column.type == "sparse":
            parts = [self._arrow.array(np.concatenate(part)) for part in zip(*arrays, strict=True)]
            return self._arrow.StructArray.from_arrays(parts, fields=list(item_type))
        flat = np.concatenate(arrays)
        if column.type == "vectors":
            return self._arrow.FixedSizeListArray.from_arrays(self._arrow.array(flat.reshape(-1)), type=item_type)
        return self._arrow.array(flat)

    def _nulls(self, values: list[Any]) -> Any:
        nulls = [value is None for value in values]
        return self._arrow.array(nulls) if any(nulls) else None


def _string(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else orjson.dumps(value).decode()
