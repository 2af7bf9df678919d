"""Notes each Python process that a test starts, and those that such processes start, for ``tests/costs.py``."""

import os
from contextlib import suppress

_notes, _test = os.environ.get("TESTS_NOTE_STARTS_IN"), os.environ.get("PYTEST_CURRENT_TEST")
if _notes and _test:
    with suppress(OSError):  # it outlives the run, or another user runs it
        _file = os.open(_notes, os.O_WRONLY | os.O_APPEND)
        os.write(_file, (_test.partition("::")[0] + "\n").encode())
        os.close(_file)
