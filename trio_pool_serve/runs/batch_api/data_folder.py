"""The folder of ``--data-dir``: the database, complete files by their ids, and uploads that are not complete."""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from attrs import frozen

from trio_pool_serve.config import Config
from trio_pool_serve.errors import StorageError, require
from trio_pool_serve.storage.durable_files import AppendedFile, make_folder, open_appended, storage_errors

ID = re.compile(r"file-[0-9a-f]{32}")
"""Names of files that may be removed: the folder may have been there before, with others."""

SOCKET_NAME = "batches.socket"


@frozen
class DataFolder:
    """The paths in the data folder. All methods block."""

    path: Path

    @classmethod
    def of(cls, config: Config) -> "DataFolder":
        """Return the folder of the settings; by default one of the user's for this port, or for this Unix socket."""
        if config.batch.data_dir:
            return cls(Path(config.batch.data_dir).absolute())
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        uds = config.network.unix_socket
        name = f"port-{config.network.port}" if uds is None else f"uds-{sha256(bytes(uds.absolute())).hexdigest()[:16]}"
        return cls(Path(state).absolute() / "trio_pool_serve" / name)

    @property
    def database(self) -> Path:
        """The path of the database."""
        return self.path / "batches.sqlite"

    def file(self, file_id: str) -> Path:
        """Return the path of a file's bytes."""
        return self.path / "files" / file_id

    def upload(self, file_id: str) -> Path:
        """Return the path of an upload that is not complete."""
        return self.path / "uploads" / file_id

    def exists(self) -> bool:
        """Whether anything has been stored in the folder, or it is read-only."""
        return self.database.exists() or self._is_read_only

    @property
    def _is_read_only(self) -> bool:
        return os.access(self.path, os.F_OK) and not os.access(self.path, os.W_OK)

    def create(self) -> None:
        """Create the folder and its subfolders, which only this user can enter. Raises ``StorageError``."""
        require(not self._is_read_only, f"{self.path} is read-only, or belongs to another user.", StorageError)
        with storage_errors(self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in (self.path / "files", self.path / "uploads"):
            make_folder(each, 0o700)

    def open_upload(self, file_id: str) -> AppendedFile:
        """Open a new upload, in a folder that is made again if someone has removed it. Raises ``StorageError``."""
        self.create()
        return open_appended(self.upload(file_id), 0)

    def remove_left(self, socket: Path) -> None:
        """Remove unfinished uploads, ``socket``, and the sockets in the folder: their processes have ended."""
        with storage_errors(self.path):
            uploads = [upload for upload in (self.path / "uploads").iterdir() if ID.fullmatch(upload.name)]
            sockets = [left for left in (socket, *self.path.glob(f"*.{SOCKET_NAME}")) if left.is_socket()]
            for left in (*uploads, *sockets):
                left.unlink(missing_ok=True)

    def file_ids(self) -> set[str]:
        """Return the ids of all complete files. Raises ``StorageError``."""
        with storage_errors(self.path):
            return {file.name for file in (self.path / "files").iterdir() if ID.fullmatch(file.name)}

    def remove_files(self, ids: Iterable[str]) -> None:
        """Remove the bytes of complete files; a later sweep removes the ones that cannot be removed now."""
        for file_id in ids:
            with suppress(OSError):
                self.file(file_id).unlink(missing_ok=True)
