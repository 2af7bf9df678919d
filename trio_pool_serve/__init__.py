"""A server for pooling models, built on structured concurrency.

``__all__`` are the public names; ``docs/stability.md`` says what they promise. Each is imported when it is first used:
importing the package alone takes no dependency along.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # isort: off
    from trio_pool_serve.app import create_app as create_app
    from trio_pool_serve.config import (
        Config as Config,
        InputConfig as InputConfig,
        LoggingConfig as LoggingConfig,
        ModelConfig as ModelConfig,
        NetworkConfig as NetworkConfig,
        ProcessesConfig as ProcessesConfig,
        SchedulingConfig as SchedulingConfig,
        ThreadsConfig as ThreadsConfig,
        TimeLimitsConfig as TimeLimitsConfig,
    )
    from trio_pool_serve.errors import (
        EngineDeadError as EngineDeadError,
        InvalidRequestError as InvalidRequestError,
        ModelLoadError as ModelLoadError,
        PoolServeError as PoolServeError,
    )
    from trio_pool_serve.python_api import (
        AsyncModel as AsyncModel,
        Classes as Classes,
        Model as Model,
        RankedDocument as RankedDocument,
        open_model as open_model,
    )
    from trio_pool_serve.server.launcher import serve as serve
    from trio_pool_serve.service import Service as Service
    from trio_pool_serve.types import SparseVector as SparseVector
    # isort: on

__version__ = "0.1.0"

_MODULES = {
    "AsyncModel": "python_api",
    "Classes": "python_api",
    "Config": "config",
    "EngineDeadError": "errors",
    "InputConfig": "config",
    "InvalidRequestError": "errors",
    "LoggingConfig": "config",
    "Model": "python_api",
    "ModelConfig": "config",
    "ModelLoadError": "errors",
    "NetworkConfig": "config",
    "PoolServeError": "errors",
    "ProcessesConfig": "config",
    "RankedDocument": "python_api",
    "SchedulingConfig": "config",
    "Service": "service",
    "SparseVector": "types",
    "ThreadsConfig": "config",
    "TimeLimitsConfig": "config",
    "create_app": "app",
    "open_model": "python_api",
    "serve": "server.launcher",
}

__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    """Import a public name from the module that has it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
