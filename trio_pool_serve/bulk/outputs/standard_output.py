"""Standard output, written to like a file that grows at its end."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trio_pool_serve.errors import StorageError


@contextmanager
def _pipe_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise StorageError("Standard output was closed by its reader before all rows were written.") from error
    except OSError as error:
        raise StorageError(f"Standard output: {error.strerror or error}.") from error


class StandardOutput:
    """Writes without a buffer, so that nothing is left to be written when the interpreter ends."""

    def __init__(self) -> None:
        self.length = 0
        with _pipe_errors():
            sys.stdout.flush()
        self._descriptor = sys.stdout.fileno()

    def append(self, data: bytes) -> None:
        """Write all of the data. Raises ``StorageError``."""
        with _pipe_errors():
            view = memoryview(data)
            while view:
                view = view[os.write(self._descriptor, view) :]
        self.length += len(data)

    def sync(self) -> int:
        """Return the length; there is nothing to wait for."""
        return self.length

    def close(self) -> None:
        """Leave it open: it belongs to the process."""
