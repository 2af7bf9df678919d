"""The first import of transformers in a process that loads in several threads. Does not import it itself."""

import importlib
from threading import Lock

_importing = Lock()


def import_transformers() -> None:
    """Import transformers, which later imports of any of its names rely on. Blocks; the first time for seconds.

    While it is imported, transformers puts another module in its own place. A thread that has found the first one by
    then, and waits for it, is given that: ``from transformers import AutoTokenizer`` fails in it. So each thread that
    loads calls this before, and the first import is of one thread alone.
    """
    with _importing:
        importlib.import_module("transformers")
