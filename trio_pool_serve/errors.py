"""Every error the server raises on purpose.

Each says when it is raised and what whoever meets it may do. How an error looks on the wire (status,
body) is not known here: ``api.error_bodies`` holds the one table.
"""


class PoolServeError(Exception):
    """The root of the hierarchy; never raised itself."""


# -- the request is at fault: sending it again unchanged gives the same answer ------------------------


class InvalidRequestError(PoolServeError):
    """A field of the request has the wrong type or value.

    ``param`` names the field, where one field is to blame.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


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
    """The route exists, but not for this HTTP method."""


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
    """Return an error that says which part of the request is to blame, as errors of the JSON itself do.

    A new one: whoever waits for the same image in another request is told where it is there.
    """
    if not place:
        return type(error)(str(error), param=error.param)
    return type(error)(f"{str(error).removesuffix('.')} - at `$.{place}`", param=field_of(place))
