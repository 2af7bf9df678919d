"""The packages of the extra ``bulk``, imported when a file needs them."""

from importlib import import_module
from typing import Any

from trio_pool_serve.errors import BulkInputError


def import_extra(module: str, purpose: str) -> Any:
    """Import a module of pyarrow or zstandard. Raises ``BulkInputError`` that says what to install."""
    try:
        return import_module(module)
    except ImportError as error:
        raise BulkInputError(f"{purpose} needs the extra [bulk]: pip install trio-pool-serve[bulk]") from error
