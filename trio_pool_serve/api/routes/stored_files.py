"""OpenAI's Files API: ``/v1/files``."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from trio_pool_serve.api.http.forwarding import forward
from trio_pool_serve.api.http.request import Handler, HttpRequest, StreamingHandler
from trio_pool_serve.api.http.response import HttpResponse, file_response
from trio_pool_serve.api.http.route_table import Routes
from trio_pool_serve.api.http.upload_form import FILE_FIELD, UploadForm, boundary_of
from trio_pool_serve.errors import (
    InvalidRequestError,
    MissingFieldError,
    NotFoundError,
    PayloadTooLargeError,
    UnavailableError,
    require_request,
)
from trio_pool_serve.rendering.memory_budget import in_units
from trio_pool_serve.runs.batch_api.batch_store import Page
from trio_pool_serve.runs.batch_api.open_batches import OpenBatches, Upload
from trio_pool_serve.runs.batch_api.stored_records import StoredFile
from trio_pool_serve.service import Service

FILES_PATH = "/v1/files"

MAX_FILE_BYTES = 200 * 2**20
"""OpenAI's limit for inputs of batches."""

FORM_BYTES = 64 * 1024
"""Bytes that a form may have around its file."""

MAX_FILENAME = 255

EXPIRY_S = range(3600, 2_592_001)
"""Seconds that ``expires_after`` may have, as in OpenAI's API."""


class ExpiresAfter(msgspec.Struct, frozen=True):
    """When a file is removed: ``seconds`` after its creation."""

    seconds: int
    anchor: Literal["created_at"] = "created_at"

    def checked(self) -> int:
        """Return the seconds. Raises ``InvalidRequestError``."""
        require_request(
            self.seconds in EXPIRY_S, f"must be from {EXPIRY_S[0]} to {EXPIRY_S[-1]} seconds.", at="expires_after"
        )
        return self.seconds


def file_object(file: StoredFile) -> dict[str, object]:
    """Return a file as OpenAI describes it."""
    return {
        "id": file.id,
        "bytes": file.bytes,
        "created_at": file.created_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "expires_at": file.expires_at,
        "status": "processed",
        "status_details": None,
        "object": "file",
    }


class FilesQuery(msgspec.Struct, frozen=True):
    """The query parameters of a list of files."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    purpose: str | None = None


def stored_route(
    service: Service, respond: Callable[[HttpRequest, OpenBatches], Awaitable[HttpResponse]], *, creates: bool = False
) -> Handler:
    """Return a handler that responds where the files are: by ``respond``, or by forwarding to another process.

    While nothing has been stored, ``respond`` gets an empty store. ``creates``: the route stores something. The handler
    raises ``StorageError`` and ``UnavailableError``. Cancellation: at once.
    """

    async def handle(request: HttpRequest) -> HttpResponse:
        place = await service.batches.locate(create=creates)
        if isinstance(place, Path):
            if request.is_forwarded:
                raise UnavailableError("Another process has just taken over the files; try again.")
            return await forward(request, place, max_body_timeout_s=service.config.time_limits.client_timeout_s)
        if place is not None:
            return await respond(request, place)
        async with service.batches.empty() as empty:
            return await respond(request, empty)

    return handle


def list_page(objects: Sequence[Mapping[str, object]], *, has_more: bool) -> HttpResponse:
    """Return the response with a page of a list of objects, which have ids."""
    first, last = (objects[0]["id"], objects[-1]["id"]) if objects else (None, None)
    return HttpResponse.json(
        {"data": objects, "first_id": first, "last_id": last, "has_more": has_more, "object": "list"}
    )


def id_in(request: HttpRequest, path: str, suffix: str = "") -> str:
    """Return the id in a request's path."""
    return request.path.removeprefix(f"{path}/").removesuffix(suffix)


def file_routes(service: Service) -> Routes:
    """Return the routes of files over a service."""

    async def upload(request: HttpRequest, batches: OpenBatches) -> HttpResponse:
        """Store a file; it is there once all of it is on the disk. Cancellation: nothing of it stays."""
        assert request.pieces is not None  # noqa: S101  (a ``StreamingHandler``)
        form = UploadForm(boundary_of(request), MAX_FILE_BYTES)
        announced = request.body.announced
        if announced > MAX_FILE_BYTES + FORM_BYTES:
            raise PayloadTooLargeError(f"The file exceeds {in_units(MAX_FILE_BYTES)}.")
        async with batches.receiving(request.owner, announced) as received:
            async for piece in request.pieces:
                if not announced:
                    await batches.reserve(received, len(piece))
                await service.offload.run("files", partial(_take, form, received, piece))
            await service.offload.run("files", partial(_take, form, received, None))
            file = await batches.complete(received, filename=_filename_of(form), expire_s=_expiry_of(form))
        return HttpResponse.json(file_object(file))

    async def files(request: HttpRequest, batches: OpenBatches) -> HttpResponse:
        query = request.query(FilesQuery)
        page = Page(query.limit, query.after, newest_first=query.order == "desc")
        found, has_more = await batches.store.files(request.owner, page, query.purpose)
        return list_page(list(map(file_object, found)), has_more=has_more)

    async def file(request: HttpRequest, batches: OpenBatches) -> HttpResponse:
        return HttpResponse.json(file_object(await batches.store.file(request.owner, id_in(request, FILES_PATH))))

    async def content(request: HttpRequest, batches: OpenBatches) -> HttpResponse:
        found = await batches.store.file(request.owner, id_in(request, FILES_PATH, "/content"))
        path = batches.folder.file(found.id)
        if not await service.offload.run("files", path.is_file):
            raise NotFoundError(f"The contents of the file {found.id} have been removed from the server's disk.")
        byte_range, is_head = request.header(b"range") or "", request.scope["method"] == "HEAD"
        return file_response(path, found.bytes, service.offload, byte_range=byte_range, is_head=is_head)

    async def delete(request: HttpRequest, batches: OpenBatches) -> HttpResponse:
        file_id = id_in(request, FILES_PATH)
        await batches.remove_file(request.owner, file_id)
        return HttpResponse.json({"id": file_id, "object": "file", "deleted": True})

    stored = partial(stored_route, service)
    return {
        ("POST", FILES_PATH): StreamingHandler(stored(upload, creates=True)),
        ("GET", FILES_PATH): stored(files),
        ("GET", f"{FILES_PATH}/{{name}}"): stored(file),
        ("GET", f"{FILES_PATH}/{{name}}/content"): StreamingHandler(stored(content)),
        ("DELETE", f"{FILES_PATH}/{{name}}"): stored(delete),
    }


def _take(form: UploadForm, received: Upload, piece: bytes | None) -> None:
    """Take a piece of the form, ``None`` at its end. Runs in a thread."""
    received.append(form.take(piece))


def _filename_of(form: UploadForm) -> str:
    """Return the name of a form's file. Raises ``InvalidRequestError`` if it has none for batches."""
    require_request(form.fields.get("purpose") == "batch", "must be 'batch'.", at="purpose")
    if form.filename is None:
        raise MissingFieldError(FILE_FIELD)
    return form.filename.replace("\\", "/").rpartition("/")[2][:MAX_FILENAME]


def _expiry_of(form: UploadForm) -> int | None:
    fields = {
        name: form.fields[f"expires_after[{name}]"]
        for name in ("anchor", "seconds")
        if f"expires_after[{name}]" in form.fields
    }
    if not fields:
        return None
    try:
        return msgspec.convert(fields, ExpiresAfter, strict=False).checked()
    except msgspec.ValidationError as error:
        raise InvalidRequestError.at("expires_after", f"is not valid: {error}.") from error
