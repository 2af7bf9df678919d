"""Keeps torch out of processes that compute nothing: it takes two seconds of start and two thirds of the memory."""

import os
import sys


def do_without_torch() -> None:
    """Make every later ``import torch`` in this process fail, transformers' own included."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # as the import system wants it
        # transformers would log that only tokenizers are available, which is all that is used here.
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"


def allow_torch() -> None:
    """Let ``import torch`` work again, for code of others in this process."""
    if "torch" in sys.modules and sys.modules["torch"] is None:
        del sys.modules["torch"]
