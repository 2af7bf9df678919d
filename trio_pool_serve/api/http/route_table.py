"""The routes of the server, and the handler of each request."""

import re
from collections.abc import Mapping
from functools import partial
from typing import NoReturn, TypeAlias

from attrs import frozen

from trio_pool_serve.api.http.request import Handler, HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.errors import MethodNotAllowedError

Routes: TypeAlias = Mapping[tuple[str, str], Handler]
"""Handlers by method and path. A path with ``/{name}`` stands for all with something in its place, slashes included;
of several such paths the one counts that has most behind it."""

SLASHES = re.compile("/{2,}")

OTHER_METHODS = ""

PLACE = "{name}"


@frozen
class _Pattern:
    """A path with something in it that differs: what is in front of it, and behind it."""

    prefix: str
    suffix: str

    @property
    def path(self) -> str:
        """The path as a route declares it."""
        return f"{self.prefix}{PLACE}{self.suffix}"

    def matches(self, path: str) -> bool:
        """Return whether a path has this form."""
        return (
            len(path) > len(self.prefix) + len(self.suffix)
            and path.startswith(self.prefix)
            and path.endswith(self.suffix)
        )


class RouteTable:
    """Finds the handler of a request by its method and path.

    GET routes answer HEAD as well; the server leaves out the body. Every path answers OPTIONS with its methods, and
    methods it does not have with 405.
    """

    def __init__(self, routes: Routes) -> None:
        self.routes = routes
        self._by_path: dict[str, dict[str, Handler]] = {}
        for (method, path), handler in routes.items():
            self._by_path.setdefault(path, {})[method] = handler
        for handlers in self._by_path.values():
            if "GET" in handlers:
                handlers.setdefault("HEAD", handlers["GET"])
            methods = ", ".join(sorted({*handlers, "OPTIONS"}))
            handlers["OPTIONS"] = partial(_list_methods, methods)
            handlers[OTHER_METHODS] = partial(_refuse_method, methods)
        patterns = [path for path in self._by_path if PLACE in path]
        self._patterns = sorted((_Pattern(*path.split(PLACE)) for path in patterns), key=lambda it: -len(it.suffix))

    def find(self, method: str, path: str) -> Handler | None:
        """Return the handler of a request; ``None`` if no route has its path."""
        handlers = self._by_path.get(path) or self._by_longer_path(path)
        return None if handlers is None else handlers.get(method, handlers[OTHER_METHODS])

    def template_of(self, path: str) -> str:
        """Return the path as a route declares it, with ``{name}`` for what differs; empty if no route has it."""
        if path in self._by_path:
            return path
        return next((pattern.path for pattern in self._patterns if pattern.matches(path)), "")

    def path_of_route(self, path: str) -> str:
        """Return a path as the routes have it: with single slashes, and none at its end; as it is if none has it."""
        if not path or path in self._by_path or self._by_longer_path(path):
            return path
        plain = SLASHES.sub("/", path).rstrip("/") or "/"
        return plain if plain in self._by_path or self._by_longer_path(plain) else path

    def _by_longer_path(self, path: str) -> dict[str, Handler] | None:
        template = next((pattern.path for pattern in self._patterns if pattern.matches(path)), None)
        return None if template is None else self._by_path[template]


async def _list_methods(methods: str, _: HttpRequest) -> HttpResponse:
    return HttpResponse(b"", content_type="text/html; charset=utf-8").with_headers({"allow": methods})


async def _refuse_method(methods: str, _: HttpRequest) -> NoReturn:
    raise MethodNotAllowedError("The method is not allowed for the requested URL.", allowed=methods)
