"""Whether the output of a complete run is still what the run has left. It is only looked at, never opened."""

from pathlib import Path

from trio_pool_serve.bulk.outputs.part_folder import check_parts, parts_behind
from trio_pool_serve.bulk.outputs.position import Position, decoded_position
from trio_pool_serve.bulk.table_formats import Format
from trio_pool_serve.errors import StorageError, StorageLostError
from trio_pool_serve.storage.durable_files import storage_errors


def check_finished(path: Path, table_format: Format, position: bytes | None) -> None:
    """Raise ``StorageError`` if the sizes of an output, or its parts, are not those of its last position. Blocking."""
    found = decoded_position(position, Position(format=str(table_format)))
    try:
        with storage_errors(path):
            if table_format.in_lines:
                _check_file(path, found)
            else:
                _check_folder(path, table_format, found)
    except StorageError as error:
        raise StorageLostError(
            f"The run is complete, but its output was changed. {error} --overwrite begins again."
        ) from error


def _check_file(path: Path, position: Position) -> None:
    if not path.exists():
        raise StorageLostError(f"{path} has been deleted.")
    size = path.stat().st_size
    if size != position.n_bytes:
        raise StorageLostError(f"{path} has {size} bytes, where {position.n_bytes} had been written.")


def _check_folder(folder: Path, table_format: Format, position: Position) -> None:
    if not folder.is_dir():
        raise StorageLostError(f"{folder} has been deleted.")
    check_parts(folder, table_format, position)
    behind = parts_behind(folder, table_format, position)
    if behind:
        raise StorageLostError(f"{behind[0]} is new: {position.parts} parts had been written.")
