"""A process that computes nothing needs no torch: two seconds of its start, and two thirds of its memory."""

import os
import sys


def do_without_torch() -> None:
    """Have every later ``import torch`` of this process fail, so that transformers does not look for it either."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # as the import system wants it
        # transformers would tell people that it can read tokenizers only, which is all it is for here.
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
