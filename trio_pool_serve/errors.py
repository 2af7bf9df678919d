"""Every error the server raises on purpose.

Each says when it is raised and what whoever meets it may do. How an error looks on the wire (status,
body) is not known here: ``api.http.error_responses`` holds the one table.
"""

import re
from collections.abc import Callable
from copy import copy
from typing import Literal, TypeAlias, cast, get_args

JobField: TypeAlias = Literal[
    "prompts",
    "chat_template",
    "template_kwargs",
    "continue_final_message",
    "tasks",
    "dimensions",
    "truncate_to",
    "prompt_name",
    "instruction",
    "queries",
    "documents",
    "max_query_tokens",
    "max_document_tokens",
    "token_ids",
]
"""What jobs and prompts call their fields; each dialect has names of its own for them."""

PLACEHOLDER = re.compile("|".join(f"{{{name}}}" for name in get_args(JobField)))


class PoolServeError(Exception):
    """The root of the hierarchy; never raised itself."""


# -- the request is at fault: sending it again unchanged gives the same answer ------------------------


class InvalidRequestError(PoolServeError):
    """A field of the request has the wrong type or value.

    ``param`` is the field's name in the request, where one field is at fault. Where that name is not known, ``field``
    is the job's name for it, and job fields that the message names are in braces: ``{dimensions} must be …``.
    """

    def __init__(self, message: str, *, param: str | None = None, field: JobField | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.field = field

    def message_with(self, name_of: Callable[[JobField], str | None]) -> str:
        """Return the message with other names for the job's fields."""
        return PLACEHOLDER.sub(lambda found: _named(found[0], name_of), self.args[0])

    def __str__(self) -> str:
        return self.message_with(lambda field: field)


def _named(placeholder: str, name_of: Callable[[JobField], str | None]) -> str:
    name = cast("JobField", placeholder[1:-1])
    return name_of(name) or name


class ContextLengthError(InvalidRequestError):
    """An input is longer than the model takes and no truncation was asked for."""


class EmptyInputError(InvalidRequestError):
    """There is nothing in an input, or no input at all."""


class TaskNotSupportedError(InvalidRequestError):
    """The model cannot do what the route is for; the message names what it can."""


class MediaError(PoolServeError):
    """An image cannot be fetched, or is none, or is too large.

    ``param`` names the field, where one field is to blame.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedMediaTypeError(PoolServeError):
    """The body is not JSON according to its own ``Content-Type``."""


class PayloadTooLargeError(PoolServeError):
    """The body is longer than ``--max-body-bytes``."""


class BodyTimeoutError(PoolServeError):
    """The body did not arrive within ``--body-timeout-s``."""


class AuthenticationError(PoolServeError):
    """The API key is missing or wrong."""


class NotFoundError(PoolServeError):
    """No such model or route."""


class MethodNotAllowedError(PoolServeError):
    """The route exists, but not for this HTTP method. ``allowed`` are those it has, as in the header ``Allow``."""

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


# -- the server is at fault, or busy: trying again later can succeed ---------------------------------


class OverloadedError(PoolServeError):
    """The queue is full. ``retry_after_s`` (seconds) estimates when there will be room."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(PoolServeError):
    """The request's deadline, its own or the server's, passed before the answer was ready."""


class UnavailableError(PoolServeError):
    """The server cannot take work now: it is loading, draining, or its engine is dead."""

    retry_after_s = 5.0


class EngineLoadingError(UnavailableError):
    """The model is still being loaded; try again once ``/readyz`` answers 200."""


class DrainingError(UnavailableError):
    """The process is on its way out and takes no new work; another one may."""


class EngineDeadError(UnavailableError):
    """The engine has stopped for good; its process is about to leave."""


class BatchFailedError(PoolServeError):
    """The forward pass raised for the batch this row rode in; other batches are not affected."""


class NotFiniteError(PoolServeError):
    """The model made infinities or NaN of an input: float16 overflows, say, or its weights are broken."""


class UnsendableError(PoolServeError):
    """One row, or its answer, cannot be sent between two processes of the server; others are not affected."""


class QueryGoneError(PoolServeError):
    """Stage two of late interaction was asked for a query that is not held: its request has ended."""


class WorkerTooSlowError(PoolServeError):
    """Work in a process of its own took longer than its time limit and was killed; whoever asked says what it was."""


class WorkerDiedError(PoolServeError):
    """The process that did some work has died; whoever asked says what the work was.

    ``exit_code`` is as ``multiprocessing`` has it: of a signal, its negative number.
    """

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


# -- start-up and the device --------------------------------------------------------------------------


class ModelLoadError(PoolServeError):
    """The model cannot be served as asked; the message is meant for the person at the terminal."""


class RunnerDeadError(PoolServeError):
    """The device is beyond recovery (a sticky CUDA error, say): no later batch can succeed."""


def field_of(place: str) -> str:
    """Return the field of a request that a place is in: of ``input[3].image`` it is ``input``."""
    return place.partition(".")[0].partition("[")[0]


def innermost(error: BaseException) -> BaseException:
    """Return the first plain exception inside a possibly nested group; a plain one is its own."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def at_place(place: str, error: InvalidRequestError | MediaError) -> InvalidRequestError | MediaError:
    """Return an error that says which part of the request is at fault, as errors of the JSON itself do.

    A new one: several requests may wait for the same image, each with its own place for it.
    """
    if not place:
        return copy(error)
    return type(error)(f"{error.args[0].removesuffix('.')} - at `$.{place}`", param=field_of(place))
