"""One Parquet or Arrow file that is being written, under a temporary name."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from trio_pool_serve.bulk.bulk_extra import import_extra
from trio_pool_serve.bulk.outputs.arrow_batches import PURPOSE
from trio_pool_serve.bulk.table_formats import Kind
from trio_pool_serve.storage.durable_files import publish, storage_errors

TEMPORARY = ".tmp"


class PartFile:
    """Writes a row group, or a record batch, at a time. All methods raise ``StorageError``."""

    def __init__(self, path: Path, kind: Kind, schema: Any) -> None:
        self.path = path
        self.temporary = path.with_name(path.name + TEMPORARY)
        with storage_errors(self.temporary):
            self._file = self.temporary.open("wb")
            self._writer = _writer(kind, self._file, schema)
        self.rows = 0

    def write(self, batch: Any) -> None:
        """Append a record batch."""
        with storage_errors(self.temporary):
            self._writer.write_batch(batch)
        self.rows += batch.num_rows

    def complete(self) -> int:
        """Give the file its name, durably; return its size in bytes."""
        with storage_errors(self.temporary):
            self._writer.close()
            self._file.close()
            size = self.temporary.stat().st_size
        publish(self.temporary, self.path)
        return size

    def discard(self) -> None:
        """Remove what was written; an error is not reported, because a resume removes it, too."""
        for step in (self._writer.close, self._file.close, self.temporary.unlink):
            with suppress(OSError, ValueError):  # ValueError: the writer or the file has been closed
                step()


def _writer(kind: Kind, file: Any, schema: Any) -> Any:
    if kind == "arrow":
        return import_extra("pyarrow", PURPOSE).ipc.new_file(file, schema)
    return import_extra("pyarrow.parquet", PURPOSE).ParquetWriter(
        file, schema, compression="zstd", use_dictionary=False, write_statistics=False, write_page_checksum=True
    )
