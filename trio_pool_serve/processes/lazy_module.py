"""Modules that are imported when they are first used: large ones that most servers never need."""

from importlib import import_module
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """Stands for a module of that name. Each use of one of its names looks it up again."""

    def __getattr__(self, name: str) -> Any:
        """Return what the module has of that name. Raises as importing the module does."""
        return getattr(import_module(self.__name__), name)
