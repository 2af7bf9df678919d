"""Errors on their way between processes: the name of a class, and a message."""

import inspect
from collections.abc import Mapping

from trio_pool_serve import errors
from trio_pool_serve.engine.remote.wire import Failure
from trio_pool_serve.errors import BatchFailedError, PoolServeError
from trio_pool_serve.processes.framed_stream import sendable


def _takes_a_message(kind: type[PoolServeError]) -> bool:
    """Return whether an error can be created from its message alone, as the receiver does."""
    try:
        inspect.signature(kind.__init__).bind(None, "")
    except TypeError:
        return False
    return True


FAILURES: Mapping[str, type[PoolServeError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, PoolServeError) and _takes_a_message(kind)
}
"""Error classes by the name that is sent. Any other error of an engine arrives as ``BatchFailedError``."""


def failure_of(error: Exception) -> Failure:
    """Return an error as it is sent: as the nearest of its bases that the receiver knows."""
    kinds = (base.__name__ for base in type(error).__mro__ if FAILURES.get(base.__name__) is base)
    return Failure(next(kinds, BatchFailedError.__name__), sendable(_message(error)))


def error_of(failure: Failure) -> PoolServeError:
    """Return a new error for a failure that was received."""
    return FAILURES.get(failure.kind, BatchFailedError)(failure.message)


def reason_of(error: Exception) -> str:
    """Return an error's class and message, whatever reading the message does."""
    return f"{type(error).__name__}: {_message(error)}"


def _message(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # a plugin's class
        return "its message cannot be read"
