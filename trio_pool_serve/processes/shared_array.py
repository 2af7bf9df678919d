"""Numbers in memory shared by processes of one machine. Each process writes only its own: nothing is locked."""

import math
import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt


def shared_array(path: Path, *shape: int) -> npt.NDArray[np.float64]:
    """Map the file at ``path`` as a float64 array; create it with zeros if it does not exist. Raises ``OSError``."""
    nbytes = 8 * math.prod(shape)
    with path.open("a+b") as file:
        file.truncate(nbytes)
        return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.float64).reshape(shape)
