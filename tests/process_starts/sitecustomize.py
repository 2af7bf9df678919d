"""Notes each Python process that a test starts, and those that such processes start, for ``tests/costs.py``."""

import os
from pathlib import Path

_notes, _test = os.environ.get("TESTS_NOTE_STARTS_IN"), os.environ.get("PYTEST_CURRENT_TEST")
if _notes and _test:
    with Path(_notes).open("a") as _file:
        _file.write(_test.partition("::")[0] + "\n")  # in one write, so that lines of several processes stay whole
