"""Numbers in memory that processes of one machine share, each of which writes its own ones only: nothing is locked."""

import math
import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt


def shared_array(path: Path, *shape: int) -> npt.NDArray[np.float64]:
    """Map the file at ``path`` as an array; it is created if it does not exist, all zeros. Raises ``OSError``."""
    nbytes = 8 * math.prod(shape)
    with path.open("a+b") as file:
        file.truncate(nbytes)
        return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.float64).reshape(shape)
