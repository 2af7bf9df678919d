"""The exceptions of the server.

Each docstring says when an error is raised and what the caller may do. The table of statuses and error types of
responses is in ``api.http.error_responses``.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Literal, Self, TypeAlias

from attrs import frozen

JobField: TypeAlias = Literal[
    "prompts", "chunks", "chat_template", "template_kwargs", "continue_final_message", "tasks", "dimensions",
    "token_pooling", "max_active_dims", "truncate_to", "prompt_name", "instruction", "queries", "documents",
    "max_query_tokens", "max_document_tokens", "token_ids",
]  # fmt: skip
"""Fields of jobs and prompts. Each dialect has its own names for them."""

OverloadReason: TypeAlias = Literal["queue", "memory", "api_key"]


class PoolServeError(Exception):
    """Base class of all errors here; not raised itself."""


@frozen
class Place:
    """Where an input is: its field, the index in it, ``None`` if the field has one input only, and what it is with."""

    field: JobField
    index: int | None = None
    company: str = ""


class InputError(PoolServeError):
    """A request that fails for one of its fields or inputs. Base class, not raised itself.

    ``param`` is the field's name in the request. If it is not known, ``field`` is the job's name for the field, and the
    message has job fields in braces: ``{dimensions} must be …``. A message about an input calls it "an input". ``row``
    is its index among inputs rendered together; ``place`` is set once, by the caller that knows its place.
    """

    def __init__(
        self, message: str, *, param: str | None = None, field: JobField | None = None, place: Place | None = None
    ) -> None:
        super().__init__(message)
        self.param, self.field, self.place, self.row = param, field, place, 0

    @classmethod
    def at(cls, place: str, problem: str) -> Self:
        """Return the error about a place in the request, such as ``input[3].image``; its field is at fault."""
        return cls(f"{place} {problem}", param=field_of(place))

    def param_with(self, name_of: Callable[[JobField], str | None]) -> str | None:
        """Return the field at fault, by a dialect's names for the job's fields."""
        field = self.place.field if self.place is not None and self.field == "prompts" else self.field
        return self.param if field is None else name_of(field)

    def message_with(self, name_of: Callable[[JobField], str | None]) -> str:
        """Return the message with a dialect's names for the job's fields, and for the input at fault."""
        if self.place is None:
            return self._with_fields(name_of)
        field, index = self.place.field, "" if self.place.index is None else f"[{self.place.index}]"
        name = f"{name_of(field) or field}{index}{self.place.company}"
        return re.sub(r"\b[Aa]n input\b", name, self._with_fields(name_of), count=1)

    def _with_fields(self, name_of: Callable[[JobField], str | None]) -> str:
        message: str = self.args[0]
        for name in ("truncate_to", self.field):
            # Other braces are in a client's text that the message quotes. A body that was not decoded has no names.
            if name is not None and f"{{{name}}}" in message:
                message = message.replace(f"{{{name}}}", name_of(name) or name)
        return message

    def __str__(self) -> str:
        return self._with_fields(lambda field: field)


class InvalidRequestError(InputError):
    """A field of the request has the wrong type or value, or an input cannot be rendered."""


def require_request(
    is_valid: bool,  # noqa: FBT001  (as an assertion)
    otherwise: str,
    *,
    param: str | None = None,
    field: JobField | None = None,
    at: str = "",
) -> None:
    """Raise ``InvalidRequestError`` with this message if a request is not valid.

    The fault is in ``param``, in the job's ``field``, or at the place ``at``.
    """
    if not is_valid:
        raise InvalidRequestError.at(at, otherwise) if at else InvalidRequestError(otherwise, param=param, field=field)


class MissingFieldError(InvalidRequestError):
    """A field is missing, or one of several: ``names``."""

    def __init__(self, *names: str, sent: Sequence[str] = ()) -> None:
        missing = f"Missing {listed([f'`{name}`' for name in names])}."
        super().__init__(f"{missing} You sent {listed([f'`{name}`' for name in sent], 'and')}." if sent else missing)
        self.param, self.names = names[0], names

    def beside(self, unknown: Sequence[str]) -> "MissingFieldError":
        """Return the error with the unknown fields of the request: only the one that was probably meant, if any."""
        for name in unknown:
            if meant := get_close_matches(name, self.names, 1):
                return MissingFieldError(*meant, sent=[name])
        return MissingFieldError(*self.names, sent=unknown)


class ContextLengthError(InvalidRequestError):
    """An input is longer than the model's maximum, and truncation was not requested."""


class EmptyInputError(InvalidRequestError):
    """An input is empty, or there are no inputs."""


class TaskNotSupportedError(InvalidRequestError):
    """The model does not support the route's task; the message names the tasks that it supports."""


class MediaError(InputError):
    """An image cannot be fetched or decoded, or is too large."""


class UnsupportedMediaTypeError(PoolServeError):
    """The ``Content-Type`` of the body is not JSON."""


class PayloadTooLargeError(PoolServeError):
    """The body is longer than ``--max-body-bytes``."""


class BodyTimeoutError(PoolServeError):
    """The body did not arrive within ``--client-timeout-s``."""


class AuthenticationError(PoolServeError):
    """The API key is missing or invalid."""


class PermissionDeniedError(PoolServeError):
    """The API key is valid but not allowed to use the route."""


class NotFoundError(PoolServeError):
    """No such model or route. ``model`` is the name that no model has, ``near`` the route that was probably meant."""

    def __init__(self, message: str, *, model: str | None = None, near: str | None = None) -> None:
        super().__init__(message)
        self.model, self.near = model, near


class ConflictError(PoolServeError):
    """The request conflicts with the state of its target: a batch has already ended, a file is in use."""


class QuotaExceededError(PoolServeError):
    """The client's limit of stored bytes, or of batches, is reached; some must be removed or end first."""


class MethodNotAllowedError(PoolServeError):
    """The route does not accept this HTTP method. ``allowed`` lists those it accepts, as in the header ``Allow``."""

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class OverloadedError(PoolServeError):
    """The queue is full, the memory for requests is used up, or an API key has reached its limit.

    ``retry_after_s`` estimates after how many seconds the request would be admitted.
    """

    def __init__(self, message: str, *, retry_after_s: float, reason: OverloadReason = "queue") -> None:
        super().__init__(message)
        self.retry_after_s, self.reason = retry_after_s, reason


class DeadlineExceededError(PoolServeError):
    """The request's deadline, its own or the server's, passed before the response was ready."""


class UnavailableError(PoolServeError):
    """The server cannot take work now: it is loading, draining, its engine is dead, or no model can make room."""

    retry_after_s = 5.0


class StartFailedError(UnavailableError):
    """The system cannot start a thread or process: a limit is reached, or memory is short. Try again later."""


class EngineLoadingError(UnavailableError):
    """The model is still being loaded; try again once ``/readyz`` answers 200."""


class DrainingError(UnavailableError):
    """The process is draining: it accepts no new work and will exit; another process may accept it."""


class EngineDeadError(UnavailableError):
    """The engine has stopped for good; its process is about to exit."""


class EngineProcessDiedError(EngineDeadError):
    """The engine process died while it computed the row; another one is being started."""


class BatchFailedError(PoolServeError):
    """The forward pass of this row failed, alone or with others that could not all be computed again."""


class AdapterError(BatchFailedError):
    """An adapter cannot be applied: its files are gone, have changed, or do not fit the model, or the backend has none.

    All rows with this adapter fail; other rows are not affected. The message has a path; clients get ``shown``.
    """

    shown = "The model's adapter cannot be applied. The server's log says why."


class OutOfDeviceMemoryError(PoolServeError):
    """The device has too little free memory: for a batch if the runner raises it, for a single row if a row fails.

    Batches are computed again in parts. A single row may succeed later, once other work has freed memory.
    """


class NotFiniteError(InputError):
    """The model's output for an input has infinities or NaN: float16 overflowed, or the weights are broken."""


class UnsendableError(PoolServeError):
    """One row or its output cannot be sent between two processes of the server; other rows are not affected."""


class BulkRowError(PoolServeError):
    """A row of a table cannot be computed, and the run stops at failures; the message has its position and id."""


class StorageError(PoolServeError):
    """A file or a database cannot be read or written, for example because the disk is read-only.

    Committed data is intact: the work can be resumed later. The message has a path, for the log; clients get ``shown``.
    """

    shown = "The server cannot use its data folder. Its log says why."


class StorageFullError(StorageError):
    """The disk is full, or the user's quota is reached."""

    shown = "The server's disk is full."


class StorageLostError(StorageError):
    """A file was deleted or truncated by someone else: work that needs it cannot be resumed."""

    shown = "Someone has removed or replaced what was in the server's data folder."


class StorageInUseError(StorageError):
    """Another process has the database open; try again once that has ended."""

    shown = "The data folder is in use by another server: give each server its own by --data-dir."
    retry_after_s = 5.0


class StorageBusyError(StorageInUseError):
    """The process has reached its limit of open files; try again once some are closed."""

    shown = "The server has as many files open as it may."


class BulkInputError(PoolServeError):
    """A table cannot be read, or not be written as requested; the message is for the user at the terminal."""


class TransferError(PoolServeError):
    """A file cannot be transferred from or to a URL; the message says why. To try again, repeat the command."""


class InputChangedError(BulkInputError):
    """A file of the input was changed or removed after it was scanned: its rows are no longer the run's."""


class WorkerTooSlowError(PoolServeError):
    """Work in a separate process exceeded its time limit and was killed; the caller knows which work."""


class WorkerDiedError(PoolServeError):
    """The process of some work has died; the caller knows which work. ``exit_code`` is negative for a signal."""

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ModelLoadError(PoolServeError):
    """The model cannot be served as configured; the message is for the user at the terminal."""

    @classmethod
    def of_model(cls, name: str, cause: BaseException) -> Self:
        """Return the error of a server that cannot start, with the name of the model."""
        return cls(f"{name} cannot be loaded: {cause}")


def require(is_right: bool, otherwise: str, error: Callable[[str], Exception] = ModelLoadError) -> None:  # noqa: FBT001
    """Raise an error with this message, by default ``ModelLoadError``, if something is not right."""
    if not is_right:
        raise error(otherwise)


class RunnerDeadError(PoolServeError):
    """The device cannot recover, for example from a sticky CUDA error: all later batches would fail."""


def field_of(place: str) -> str:
    """Return the top-level field of a place in a request: ``input`` for ``input[3].image``."""
    return place.partition(".")[0].partition("[")[0]


def listed(names: Sequence[str], word: str = "or") -> str:
    """Return names in a sentence: ``a, b or c``."""
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def innermost(error: BaseException) -> BaseException:
    """Return the first plain exception inside a possibly nested group, or the exception itself if it is plain."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextmanager
def unwrap_exception_groups(*types: type[BaseException]) -> Iterator[None]:
    """Raise a single error in place of an exception group whose exceptions are all of one of the ``types``.

    The error is the first one of the first of ``types`` in the group. If the group has other exceptions, including
    ``trio.Cancelled``, those are raised as a group, as ``except*`` does.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        if (error := _expected_of(group, types)) is None:
            raise
        raise error from error.__cause__  # without the group as its context


def _expected_of(group: BaseExceptionGroup, types: tuple[type[BaseException], ...]) -> BaseException | None:
    # A function, so that the traceback's frames do not keep parts of the group until a garbage collection.
    expected, rest = group.split(types)
    if expected is None:
        return None
    single = next(innermost(found) for kind in types if (found := expected.subgroup(kind)))
    return single if rest is None else rest


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error, its causes and its group, once it is answered or returned by a thread.

    Their frames refer to objects of the request, and often to the error: only the garbage collector would free them.
    """
    for each in related_errors(error, hidden=True):
        each.__traceback__ = None


def related_errors(error: BaseException, *, hidden: bool = False) -> Iterator[BaseException]:
    """Yield an error, its group's members, its causes, and so on, each once; ``hidden``: suppressed contexts, too."""
    pending, seen = [error], set[int]()
    while pending:
        each = pending.pop(0)
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            context = None if each.__suppress_context__ and not hidden else each.__context__
            members = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
            pending += filter(None, (*members, each.__cause__, context))


def install_extra(name: str) -> str:
    """Return a sentence that says how to install an extra, from the index or from a clone."""
    from_index, from_clone = f"pip install 'trio-pool-serve[{name}]'", f"pip install --editable '.[{name}]'"
    return f"Install the extra `{name}`: {from_index}, or in a clone: {from_clone}."
