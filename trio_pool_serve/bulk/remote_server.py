"""Computes rows by requests to a server: this one, or for embeddings any with OpenAI's API."""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from operator import itemgetter
from typing import Any

import httpx
import msgspec
import trio
from attrs import define, evolve, field

from trio_pool_serve.bulk.bulk_options import RunOptions, TextOptions
from trio_pool_serve.bulk.file_urls import without_secrets
from trio_pool_serve.bulk.table_task import TableComputer, TaskOptions, Values, compute_halving, compute_parts
from trio_pool_serve.errors import BulkInputError, InvalidRequestError, PoolServeError, UnavailableError, require
from trio_pool_serve.runs.run import WindowResult
from trio_pool_serve.runs.tables.input_rows import InputRow
from trio_pool_serve.runs.tables.output_rows import RowResult

ROWS_PER_REQUEST = 64

ATTEMPTS = 8
"""Attempts to send one request. The pauses between them double from ``FIRST_PAUSE_S``, or the server sets them."""

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 60.0

TIMEOUT_S = 600.0

MAX_ERROR = 500
"""Characters of a server's error that are kept."""


class RefusedRowsError(PoolServeError):
    """The server rejects a request because of one of its rows, or because of all."""


@define(eq=False)
class RemoteServer(TableComputer):
    """Sends the rows of a window in requests of up to 64, at most ``--concurrency`` of them at a time."""

    client: httpx.AsyncClient
    name: str
    """The name of the model."""
    limiter: trio.CapacityLimiter
    """Limits the requests at a time."""
    length: int | None = field(init=False, default=None)
    """The length of the vectors that are written, once it is known."""

    @property
    def url(self) -> str:
        """The URL of the server, without secrets."""
        return without_secrets(str(self.client.base_url))

    async def identity(self) -> dict[str, str]:
        """Return the server and its model."""
        return {"--url": self.url, "the server's model": self.name}

    async def compute(self, rows: Sequence[InputRow]) -> WindowResult[RowResult]:
        """Compute rows of a window; see ``Computer``. Their bytes depend on the server."""
        parts = self.parts_of(rows, ROWS_PER_REQUEST)
        faults = (RefusedRowsError, InvalidRequestError)
        return await compute_parts(len(parts), lambda index: compute_halving(parts[index], self.request, faults))

    async def request(self, rows: Sequence[Values]) -> tuple[list[Values], int]:
        """Return the values of rows, and their tokens.

        Raises ``RefusedRowsError``, ``UnavailableError``, and ``BulkInputError`` if the run cannot continue.
        """
        record = self.task.record
        fields = {
            "model": self.name,
            **record.fields(*self.task.texts_of(rows)),
            "truncate_prompt_tokens": -1 if self.text.truncate else None,
            "prompt_name": self.text.prompt_name,
            "input_type": self.text.input_type,
            "top_n": self.task.top_n,
            "dimensions": self.task.dimensions,
        }
        async with self.limiter:
            answer = await self._post(record.path, {name: value for name, value in fields.items() if value is not None})
        try:
            items = [answer["results"]] if record.is_ranking else sorted(answer["data"], key=itemgetter("index"))
            values = [self._checked(record.of_item(item)) for item in items]
            tokens = int((answer.get("usage") or {}).get("total_tokens") or 0)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UnavailableError(
                f"The server's response to {record.path} does not have the form of OpenAI's API: {error!r}."
            ) from error
        require(
            len(values) == len(rows),
            f"The server's response to {record.path} contains {len(values)} results for {len(rows)} rows.",
            UnavailableError,
        )
        return values, tokens

    def _checked(self, values: Values) -> Values:
        """Return the values of a row as they are written.

        Raises ``ValueError`` for an array with other axes, and ``BulkInputError`` for vectors of another length.
        """
        n_axes = self.task.record.n_axes
        if not n_axes:
            return values
        (array,) = values
        if array.ndim != n_axes:
            raise ValueError(f"an array of shape {array.shape}, which must have {n_axes} axes")
        if self.length is not None and array.shape[-1] != self.length:
            reason = " It may not support --dimensions." if self.task.dimensions else ""
            raise BulkInputError(
                f"The server sends vectors of {array.shape[-1]} numbers; {self.length} were expected.{reason}"
            )
        return self.task.written(values)

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the response to a request, which is sent up to ``ATTEMPTS`` times. Cancellation: at once."""
        content = msgspec.json.encode(body)
        pause_s, reason = FIRST_PAUSE_S, ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await trio.sleep(pause_s)
                pause_s = min(MAX_PAUSE_S, 2 * pause_s)
            try:
                response = await self.client.post(path, content=content, headers={"content-type": "application/json"})
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            if response.status_code == 200:
                return decoded(response, path)
            check_redirect(response, path)
            reason = f"status {response.status_code}: {message_of(response)}"
            require(
                response.status_code not in (401, 403, 404, 405),
                f"The server refuses {path}: {reason}",
                BulkInputError,
            )
            if response.status_code not in (408, 409, 425, 429) and response.status_code < 500:
                raise RefusedRowsError(message_of(response))
            pause_s = max(pause_s, min(MAX_PAUSE_S, _retry_after_s(response)))
        raise UnavailableError(f"{path} failed {ATTEMPTS} times at the server, the last time with {reason}")

    async def describe(self) -> None:
        """Ask the server for its model, and for a sample's vector, whose length the columns need.

        Raises ``UnavailableError`` and ``BulkInputError``. Cancellation: at once.
        """
        try:
            response = await self.client.get("/v1/models")
            cards = decoded(response, "/v1/models").get("data") or [] if response.status_code == 200 else []
        except httpx.TransportError as error:
            raise UnavailableError(f"The server at {self.url} does not respond: {error!r}.") from error
        names = [str(card.get("id")) for card in cards if isinstance(card, dict)]
        if not self.name:
            if not names:
                check_redirect(response, "/v1/models")
                raise BulkInputError("The server lists no models. Name one with --model.")
            self.name = names[0]
        length = 0
        if self.task.record.n_axes:
            sample = evolve(self, task=TaskOptions(task=self.task.task, columns=self.task.columns))
            try:
                ((vector,),), _ = await sample.request([self.task.record.example])
            except RefusedRowsError as error:
                raise BulkInputError(f"The server refuses a test input: {error}") from error
            length = vector.shape[-1]
            self.length = self.task.dimensions or length
        self.columns = self.task.output_columns(length)


def decoded(response: httpx.Response, path: str) -> dict[str, Any]:
    """Return a response's JSON object. Raises ``UnavailableError``."""
    try:
        return msgspec.json.decode(response.content, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise UnavailableError(f"The server's response to {path} is not JSON: {error}.") from error


def check_redirect(response: httpx.Response, path: str) -> None:
    """Raise ``BulkInputError`` for a redirect: the server's address is wrong, not the rows."""
    if 300 <= response.status_code < 400:
        target = response.next_request
        where = f" to {without_secrets(str(target.url))}" if target is not None else ""
        raise BulkInputError(
            f"The server redirects {path}{where} (status {response.status_code}). Use its own address as --url."
        )


def message_of(response: httpx.Response) -> str:
    """Return the message in an error's body, or the beginning of the body."""
    try:
        found: Any = msgspec.json.decode(response.content)
    except msgspec.MsgspecError:
        return response.text[:MAX_ERROR]
    for name in ("error", "message"):
        found = found.get(name, found) if isinstance(found, dict) else found
    return str(found)[:MAX_ERROR]


def _retry_after_s(response: httpx.Response) -> float:
    """Return the seconds to wait that the server asks for; 0 without a number of seconds in its response."""
    retry_after = response.headers.get("retry-after", "")
    return float(retry_after) if re.fullmatch(r"\d+(\.\d+)?", retry_after) else 0.0


@asynccontextmanager
async def open_remote_server(options: RunOptions, task: TaskOptions, text: TextOptions) -> AsyncIterator[RemoteServer]:
    """Compute by the server of ``--url`` for as long as the block lasts. Raises as ``RemoteServer.describe``.

    Cancellation: at once.
    """
    headers = {} if options.api_key is None else {"authorization": f"Bearer {options.api_key}"}
    base_url = (options.url or "").rstrip("/").removesuffix("/v1")
    limits = httpx.Limits(max_connections=options.concurrency, max_keepalive_connections=options.concurrency)
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=TIMEOUT_S, limits=limits) as client:
        server = RemoteServer(task, text, (), client, options.model or "", trio.CapacityLimiter(options.concurrency))
        await server.describe()
        yield server
