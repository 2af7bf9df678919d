"""Opening the files of a model's folder, so that none can keep the loading thread for ever."""

import os
import stat
from pathlib import Path

from trio_pool_serve.errors import ModelLoadError

MAX_FILE_BYTES = 2**28
"""Of a file that is parsed here: tokenizer.json is the largest, with tens of MB."""


def read_text(path: Path) -> str:
    """Return the text of a regular file. Raises ``OSError`` or ``ValueError``."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(opened, "rb") as file:  # noqa: PTH123  (a descriptor, not a path)
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError("it is not a regular file")
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
    return content.decode("utf-8")


def require_regular_files(folder: Path) -> None:
    """Raise ``ModelLoadError`` for a FIFO or a device, at most two levels deep: libraries would wait for its bytes."""
    try:
        for path in (*folder.glob("[!.]*"), *folder.glob("[!.]*/[!.]*")):
            if path.exists() and not (path.is_file() or path.is_dir()):
                raise ModelLoadError(f"{path} is neither a file nor a folder.")
    except OSError as error:
        raise ModelLoadError(f"{folder} cannot be read: {error}") from error
