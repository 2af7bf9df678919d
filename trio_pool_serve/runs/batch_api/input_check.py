"""The check of a whole input file before a batch is computed."""

from collections.abc import Callable, Iterator
from hashlib import blake2b

from attrs import define, field

from trio_pool_serve.errors import NotFoundError
from trio_pool_serve.runs.batch_api.stored_records import BatchError
from trio_pool_serve.runs.requests.request_lines import Line
from trio_pool_serve.runs.run import Window

MAX_LINES = 50_000
"""As OpenAI's."""

MAX_ERRORS = 200
"""That are listed; the check goes no further."""

WINDOWS_AT_ONCE = 16
"""That ``check_some`` reads: some milliseconds of work."""


@define(eq=False)
class InputCheck:
    """Checks the lines of a file, a part with each call of ``check_some``.

    ``model_of`` returns the name of the model that a line's name of it stands for, ``None`` being the default, and
    raises ``NotFoundError`` for one that may not be used.
    """

    endpoint: str
    model_of: Callable[[str | None], str]
    total: int = field(default=0, init=False)
    """Lines so far, without blank ones."""
    model: str | None = field(default=None, init=False)
    errors: list[BatchError] = field(init=False, factory=list)
    _seen: set[bytes] = field(init=False, factory=set)
    """Digests of the custom ids, which take less memory."""

    def check_some(self, windows: Iterator[Window[Line]]) -> bool:
        """Check the next windows; return whether the check has ended. Blocks. Raises ``StorageError``."""
        for _ in range(WINDOWS_AT_ONCE):
            window = next(windows, None)
            for line in () if window is None else window.rows:
                self._check(line)
            if window is None or len(self.errors) >= MAX_ERRORS or self.total > MAX_LINES:
                self._end()
                return True
        return False

    def _end(self) -> None:
        if self.total > MAX_LINES:
            self.errors.insert(
                0,
                BatchError(code="too_many_tasks", message=f"A file may have {MAX_LINES} requests, and this has more."),
            )
        elif not self.total:
            self.errors.append(BatchError(code="empty_file", message="The file has no requests."))
        del self.errors[MAX_ERRORS:]

    def _check(self, line: Line) -> None:
        self.total += 1
        if line.error is not None:
            self._add(line.number, line.error.code, line.error.message, line.error.param)
        if line.custom_id is not None:
            digest = blake2b(line.custom_id.encode(errors="surrogatepass"), digest_size=16).digest()
            if digest in self._seen:
                self._add(
                    line.number,
                    "duplicate_custom_id",
                    f"The custom_id {line.custom_id!r} is that of an earlier line, too.",
                    "custom_id",
                )
            self._seen.add(digest)
        if line.error is not None:
            return
        if line.url != self.endpoint:
            self._add(
                line.number, "url_mismatch", f"The url of the line is not the batch's endpoint, {self.endpoint}.", "url"
            )
        try:
            model = self.model_of(line.model)
        except NotFoundError:
            self._add(line.number, "model_mismatch", f"The model `{line.model}` does not exist.", "body.model")
            return
        if self.model is None:
            self.model = model
        elif model != self.model:
            self._add(
                line.number,
                "model_mismatch",
                f"The line is for the model `{model}`, an earlier one for `{self.model}`.",
                "body.model",
            )

    def _add(self, number: int, code: str, message: str, param: str | None) -> None:
        if len(self.errors) < MAX_ERRORS:
            shown = message if len(message) <= 500 else f"{message[:500]}…"
            self.errors.append(BatchError(code=code, message=shown, line=number + 1, param=param))
