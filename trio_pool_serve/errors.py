"""The exceptions that the server raises.

Each docstring is when an error is raised, and what its receiver may do. The wire format (status, body) is not here:
``api.http.error_responses`` has the one table.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Literal, Self, TypeAlias, cast, get_args

JobField: TypeAlias = Literal[
    "prompts",
    "chunks",
    "chat_template",
    "template_kwargs",
    "continue_final_message",
    "tasks",
    "dimensions",
    "truncate_to",
    "padded",
    "prompt_name",
    "instruction",
    "queries",
    "documents",
    "max_query_tokens",
    "max_document_tokens",
    "token_ids",
]
"""Names of the fields of jobs and prompts; each dialect has other names for them."""

OverloadReason: TypeAlias = Literal["queue", "memory", "api_key"]

PLACEHOLDER = re.compile("|".join(f"{{{name}}}" for name in get_args(JobField)))


class PoolServeError(Exception):
    """The base class of all of them; never raised itself."""


class InvalidRequestError(PoolServeError):
    """A field of the request has the wrong type or value.

    ``param`` is the field's name in the request, where one field is at fault. Where that name is not known, ``field``
    is the job's name for it, and job fields that the message names are in braces: ``{dimensions} must be …``.
    ``prompt`` is the prompt that cannot be rendered, if that is the reason.
    """

    prompt: object = None

    def __init__(self, message: str, *, param: str | None = None, field: JobField | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.field = field

    def message_with(self, name_of: Callable[[JobField], str | None]) -> str:
        """Return the message with other names for the job's fields."""
        return PLACEHOLDER.sub(lambda found: self._named(found[0], name_of), self.args[0])

    def _named(self, placeholder: str, name_of: Callable[[JobField], str | None]) -> str:
        name = cast("JobField", placeholder[1:-1])
        # Others are a client's text that the message quotes.
        return name_of(name) or name if name in (self.field, "truncate_to") else placeholder

    def __str__(self) -> str:
        return self.message_with(lambda field: field)


class ContextLengthError(InvalidRequestError):
    """An input is longer than the model's maximum, and truncation was not requested."""


class EmptyInputError(InvalidRequestError):
    """An input is empty, or there are no inputs."""


class TaskNotSupportedError(InvalidRequestError):
    """The model does not support the route's task; the message names the tasks that it supports."""


class MediaError(PoolServeError):
    """An image cannot be fetched or decoded, or is too large.

    ``param`` names the field, if one field is at fault.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedMediaTypeError(PoolServeError):
    """The body is not JSON according to its own ``Content-Type``."""


class PayloadTooLargeError(PoolServeError):
    """The body is longer than ``--max-body-bytes``."""


class BodyTimeoutError(PoolServeError):
    """The body did not arrive within ``--client-timeout-s``."""


class AuthenticationError(PoolServeError):
    """The API key is missing or wrong."""


class PermissionDeniedError(PoolServeError):
    """The API key is right, but may not use the route."""


class NotFoundError(PoolServeError):
    """No such model or route."""


class ConflictError(PoolServeError):
    """The request does not fit the state of what it is for: a batch has ended already, a file is in use."""


class QuotaExceededError(PoolServeError):
    """The client has stored as much as it may, or has as many batches; some must be removed, or end, first."""


class MethodNotAllowedError(PoolServeError):
    """The route exists, but not for this HTTP method. ``allowed`` are those it has, as in the header ``Allow``."""

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class OverloadedError(PoolServeError):
    """The queue is full, requests hold all memory for them, or an API key has used what it may.

    ``retry_after_s`` estimates after how many seconds the request would be admitted.
    """

    def __init__(self, message: str, *, retry_after_s: float, reason: OverloadReason = "queue") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason


class DeadlineExceededError(PoolServeError):
    """The request's deadline, its own or the server's, passed before the response was ready."""


class UnavailableError(PoolServeError):
    """The server cannot take work now: it is loading, draining, or its engine is dead."""

    retry_after_s = 5.0


class StartFailedError(UnavailableError):
    """The system lets no thread or process start: none is left, or no memory or file descriptor. Try again later."""


class EngineLoadingError(UnavailableError):
    """The model is still being loaded; try again once ``/readyz`` answers 200."""


class ModelsBusyError(UnavailableError):
    """No further model can be loaded before a request that uses another one has ended; try again then."""


class DrainingError(UnavailableError):
    """The process is draining: it takes no new work and will exit; another process may take it."""


class EngineDeadError(UnavailableError):
    """The engine has stopped for good; its process is about to exit."""


class EngineProcessDiedError(EngineDeadError):
    """The engine process has died while it computed the row; another one is being started."""


class BatchFailedError(PoolServeError):
    """The forward pass of this row raised, alone or with others that could not all be computed again."""


class OutOfDeviceMemoryError(PoolServeError):
    """The device has too little free memory: for a batch when the runner raises it, for one row alone when a row fails.

    Batches are computed again in parts. A row by itself may succeed later, if something else takes the memory now.
    """


class NotFiniteError(PoolServeError):
    """The model's output for an input has infinities or NaN: float16 overflowed, or the weights are broken."""


class UnsendableError(PoolServeError):
    """One row, or its answer, cannot be sent between two processes of the server; others are not affected."""


class BulkRowError(PoolServeError):
    """A row of a table cannot be computed, and the run is to stop for it; the message has its place and its id."""


class StorageError(PoolServeError):
    """A file or a database cannot be read or written, because the disk is read-only for example.

    What had been committed before is still there. Once the cause is mended, the same work can go on. The message is for
    the log and has a path; clients are shown ``shown``, which has none.
    """

    shown = "The server cannot use its data folder. Its log says why."


class StorageFullError(StorageError):
    """The disk is full, or the quota of the user that the process runs as."""

    shown = "The server's disk is full."


class StorageLostError(StorageError):
    """A file has been deleted or cut off by someone else: work that needs it cannot go on."""

    shown = "Someone has removed or replaced what was in the server's data folder."


class StorageInUseError(StorageError):
    """Another process has opened the database; try again when that has ended."""

    shown = "The data folder is in use by another server: give each server its own by --data-dir."
    retry_after_s = 5.0


class StorageBusyError(StorageInUseError):
    """The process has as many files open as it may; try again when some are closed."""

    shown = "The server has as many files open as it may."


class BulkInputError(PoolServeError):
    """A table of bulk work cannot be read, or not be written as asked; the message is for the user at the terminal.

    No such file, an unknown format or column, a damaged file, a package that is not installed.
    """


class TransferError(PoolServeError):
    """A file cannot be downloaded from a URL, or not be uploaded to one; the message has the method and the reason.

    What was computed is still on the disk. The same command tries it again.
    """


class InputChangedError(BulkInputError):
    """A file of the input was changed or removed since it was scanned: the rows are no longer those of the run."""


class WorkerTooSlowError(PoolServeError):
    """Work in a separate process took longer than its time limit and was killed; the caller knows what work it was."""


class WorkerDiedError(PoolServeError):
    """The process that did some work has died; the caller knows what work it was.

    ``exit_code`` is that of ``multiprocessing``: negative for the number of a signal.
    """

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ModelLoadError(PoolServeError):
    """The model cannot be served as configured; the message is for the user at the terminal."""

    @classmethod
    def of_model(cls, name: str, cause: BaseException) -> Self:
        """Return the error for a server that does not start, which may have several models."""
        return cls(f"{name} cannot be loaded: {cause}")


class RunnerDeadError(PoolServeError):
    """The device cannot recover, for example from a sticky CUDA error: no later batch can succeed."""


def field_of(place: str) -> str:
    """Return the top-level field of a place in a request: ``input`` for ``input[3].image``."""
    return place.partition(".")[0].partition("[")[0]


def innermost(error: BaseException) -> BaseException:
    """Return the first plain exception inside a possibly nested group, or the exception itself if it is plain."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextmanager
def unwrap_exception_groups(*types: type[BaseException]) -> Iterator[None]:
    """Raise a single error in place of an exception group whose exceptions all have one of the ``types``.

    It is the first error of the first of ``types`` that occurs in the group. Of a group with other exceptions,
    ``trio.Cancelled`` included, those others are raised as a group, as ``except*`` would.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        error = _expected_of(group, types)
        if error is None:
            raise
        raise error from error.__cause__  # the group that it was in is not its context


def _expected_of(group: BaseExceptionGroup, types: tuple[type[BaseException], ...]) -> BaseException | None:
    # A function of its own: in a frame of its traceback, a part of the group would wait for the garbage collector.
    expected, rest = group.split(types)
    if expected is None:
        return None
    single = next(innermost(found) for kind in types if (found := expected.subgroup(kind)))
    return single if rest is None else rest


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error, its causes and its group: of one that is answered, or returned by a thread.

    Frames refer to what a request holds, often to the error too, and only the garbage collector would free them.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        each = pending.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            pending += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]


def at_place(place: str, error: InvalidRequestError | MediaError) -> InvalidRequestError | MediaError:
    """Return an error whose message and ``param`` name the part of the request at fault, as JSON errors do.

    A new error: the same image may be at another place in another request that waits for it.
    """
    if not place:
        return copy(error)
    return type(error)(f"{error.args[0].removesuffix('.')} - at `$.{place}`", param=field_of(place))
