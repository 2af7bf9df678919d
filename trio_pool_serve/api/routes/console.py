"""``/console``: a page that shows the load of the server, and the outputs of its models for texts.

The page and its scripts need no key, since a browser sends none for them, and contain nothing of this server. Their
data is fetched by routes that need a key like any other.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from importlib.resources import files
from pathlib import PurePath
from typing import Annotated

import msgspec

from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.api.http.route_table import Routes, fixed
from trio_pool_serve.api.routes.models import main_task_of
from trio_pool_serve.service import Service
from trio_pool_serve.serving.served_model import ServedModel

CONSOLE_PATH = "/console"
LIVE_PATH = f"{CONSOLE_PATH}/live"
MODELS_PATH = f"{CONSOLE_PATH}/models"

FOLDER = files("trio_pool_serve") / "console"

MAX_LABELS = 1000
"""Labels of a model that are listed."""

CONTENT_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

SECURITY_HEADERS = {
    # blob: pictures and downloads that the page makes itself; data: pictures that are dropped on it.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def console_files() -> dict[str, str]:
    """Return the files of the page, by path below ``/console/``, with their content types; the page is ``""``."""
    paths = [folder + entry.name for folder in ("", "panels/", "vendor/") for entry in (FOLDER / folder).iterdir()]
    kinds = {path: CONTENT_TYPES.get(PurePath(path).suffix) for path in paths}
    return {"" if path == "index.html" else path: kind for path, kind in kinds.items() if kind is not None}


OPEN_ROUTES = frozenset(
    (method, f"{CONSOLE_PATH}/{name}".rstrip("/")) for method in ("GET", "HEAD") for name in console_files()
)
"""Routes that need no API key."""


class LiveQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Query parameters of ``/console/live``: the number of the last sample that the viewer has."""

    after: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0


async def _live_events(service: Service, after: int) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events: the samples that are kept, then each new one, until the server drains."""
    has_ended = False
    while not has_ended:
        after, samples = await service.live.samples_after(after)
        has_ended = service.draining
        yield b"".join(b"data: " + sample + b"\n\n" for sample in samples)


def console_routes(service: Service) -> Routes:
    """Return the routes of the page over a service."""

    def file(name: str, content_type: str) -> HttpResponse:
        content = (FOLDER / (name or "index.html")).read_bytes()
        return HttpResponse(content, content_type).with_headers(SECURITY_HEADERS)

    async def live(request: HttpRequest) -> HttpResponse:
        after = request.query(LiveQuery).after
        request.end()  # a page that is open is no running request of its key
        is_head = request.scope["method"] == "HEAD"
        return HttpResponse.events(b"" if is_head else aclosing(_live_events(service, after)))

    async def models(request: HttpRequest) -> HttpResponse:
        adapters = service.models.adapters_among(request.models)
        return HttpResponse.json(
            [
                *(_described(served) for served in service.models.among(request.models)),
                *({**_described(served), "id": adapter.name} for served, adapter in adapters),
            ]
        )

    return {
        **{
            ("GET", f"{CONSOLE_PATH}/{name}".rstrip("/")): fixed(file(name, content_type))
            for name, content_type in console_files().items()
        },
        ("GET", LIVE_PATH): live,
        ("GET", MODELS_PATH): models,
    }


def _described(served: ServedModel) -> dict[str, object]:
    """Return the abilities of a model that the page's forms depend on."""
    folder = served.folder
    spec = None if folder is None else folder.spec  # not known before the model is loaded for the first time
    return {
        "id": served.source.name,
        "state": served.shown_state,
        "task": None if folder is None else main_task_of(folder),
        "tasks": [] if spec is None else sorted(spec.tasks),
        "scoring": spec and spec.scoring,
        "max_model_len": 0 if folder is None else folder.max_model_len,
        "prompts": [] if folder is None else sorted(folder.prompts),
        "labels": [] if spec is None else spec.labels[:MAX_LABELS],
        "accepts_images": folder is not None and folder.reads_images,
        "normalizes": spec is not None and spec.normalizes,
    }
