"""Large modules that most processes do without: imported on first use, or never.

torch takes two seconds of start and two thirds of the memory of a process that computes nothing.
"""

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """Stands for the module of that name, which is imported when one of its names is used."""

    def __getattr__(self, name: str) -> Any:
        """Return a name of the module. Raises whatever importing the module raises."""
        return getattr(import_module(self.__name__), name)


def forbid_torch() -> None:
    """Make every later ``import torch`` in this process fail, including transformers' own."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # as the import system wants it
        # Otherwise transformers logs that only tokenizers are available, which is all that is used here.
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"


def allow_torch() -> None:
    """Let ``import torch`` work again, for other code in this process."""
    if "torch" in sys.modules and sys.modules["torch"] is None:
        del sys.modules["torch"]
