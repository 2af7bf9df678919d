"""The check of a whole input file before a batch is computed."""

from collections.abc import Callable, Iterator
from hashlib import blake2b

from attrs import define, field
from msgspec.structs import replace

from trio_pool_serve.errors import NotFoundError
from trio_pool_serve.runs.requests.request_lines import BatchError, Line
from trio_pool_serve.runs.run import Window

MAX_LINES = 50_000
"""The limit of lines, which is OpenAI's."""

MAX_ERRORS = 200
"""The limit of errors that are listed; the check ends with it."""

WINDOWS_PER_CALL = 16
"""Windows that ``check_some`` reads: some milliseconds of work."""

MAX_MESSAGE = 500
"""Characters of an error's message."""


@define(eq=False)
class InputCheck:
    """Checks the lines of a file, a part with each call of ``check_some``.

    ``model_of`` returns the full name of a model for the name in a line, which is ``None`` for the default model. It
    raises ``NotFoundError`` for a model that may not be used.
    """

    endpoint: str
    model_of: Callable[[str | None], str]
    total: int = field(default=0, init=False)
    """Lines so far, without blank ones."""
    model: str | None = field(default=None, init=False)
    errors: list[BatchError] = field(init=False, factory=list)
    _seen: set[bytes] = field(init=False, factory=set)
    """Digests of the custom ids: they take less memory than the ids."""

    def check_some(self, windows: Iterator[Window[Line]]) -> bool:
        """Check the next windows; return whether the check has ended. Blocks. Raises ``StorageError``."""
        for _ in range(WINDOWS_PER_CALL):
            window = next(windows, None)
            for line in () if window is None else window.rows:
                self.total += 1
                self.errors += [_shown(error, line.number) for error in self._errors_of(line)]
            if window is None or len(self.errors) >= MAX_ERRORS or self.total > MAX_LINES:
                self._end()
                return True
        return False

    def _end(self) -> None:
        if self.total > MAX_LINES:
            message = f"The file contains more than {MAX_LINES} requests, which is the limit."
            self.errors.insert(0, BatchError("too_many_tasks", message))
        elif not self.total:
            self.errors.append(BatchError("empty_file", "The file contains no requests."))
        del self.errors[MAX_ERRORS:]

    def _errors_of(self, line: Line) -> Iterator[BatchError]:
        if line.error is not None:
            yield line.error
        if line.custom_id is not None:
            digest = blake2b(line.custom_id.encode(errors="surrogatepass"), digest_size=16).digest()
            if digest in self._seen:
                message = f"An earlier line has the same custom_id {line.custom_id!r}."
                yield BatchError("duplicate_custom_id", message, "custom_id")
            self._seen.add(digest)
        if line.error is not None:
            return
        if line.url != self.endpoint:
            message = f"The url is `{line.url}`; the endpoint of the batch is {self.endpoint}."
            yield BatchError("url_mismatch", message, "url")
        try:
            model = self.model_of(line.model)
        except NotFoundError:
            yield BatchError("model_mismatch", f"The model `{line.model}` does not exist.", "body.model")
            return
        if self.model is None:
            self.model = model
        elif model != self.model:
            message = f"This line requests the model `{model}`, but an earlier line `{self.model}`."
            yield BatchError("model_mismatch", message, "body.model")


def _shown(error: BatchError, number: int) -> BatchError:
    message = error.message if len(error.message) <= MAX_MESSAGE else f"{error.message[:MAX_MESSAGE]}…"
    return replace(error, message=message, line=number + 1)
