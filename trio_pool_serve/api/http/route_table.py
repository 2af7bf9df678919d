"""The routes of the server, and the handler of each request."""

import logging
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from os.path import commonpath
from typing import Any, NoReturn, TypeAlias

from trio_pool_serve.api.http.request import Handler, HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.errors import MethodNotAllowedError, NotFoundError, listed

Routes: TypeAlias = Mapping[tuple[str, str], Handler]
"""Handlers by method and path. ``/{name}`` in a path matches anything, slashes included; if several paths match, the
one with the longest end is chosen."""

logger = logging.getLogger(__name__)

SLASHES = re.compile("/{2,}")

DOUBLED = ("/v1/v1/", "/v1/v2/", "/v1/api/")
"""Beginnings of the paths of clients whose base URL ends in ``/v1``, though they add the rest by themselves."""

GENERATING = re.compile(r"/(chat|completions|responses|messages|generate|generate_stream)(/|$)")
"""Routes of servers that generate text."""

LIKENESS = 0.8
"""How similar to a route a path must be for the route to have been meant."""

MAX_PATH = 200
"""Characters of a path that an error shows; longer ones are compared with no route."""

OTHER_METHODS = ""

PLACE = "{name}"


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
            methods = sorted({*handlers, "OPTIONS"})
            allow = ("allow", ", ".join(methods))
            handlers["OPTIONS"] = fixed(HttpResponse(b"", "text/html; charset=utf-8", headers=(allow,)))
            handlers[OTHER_METHODS] = partial(_refuse_method, methods)
        templates = (path for path in self._by_path if PLACE in path)
        self._patterns = {
            path: re.compile(".+".join(map(re.escape, path.split(PLACE))), re.DOTALL)
            for path in sorted(templates, key=lambda path: -len(path.partition(PLACE)[2]))
        }
        """Patterns of the paths with ``{name}``."""
        self._has_warned = False

    def request_of(self, scope: Mapping[str, Any], max_body_bytes: int) -> HttpRequest:
        """Return the request of an ASGI scope, with the route that it is for."""
        path = self.path_of_route(_below_root_path(scope["path"], scope.get("root_path", "")))
        request = HttpRequest(scope, path, max_body_bytes)
        request.route = self.template_of(path)
        return request

    def find(self, method: str, template: str) -> Handler | None:
        """Return the handler of a request by its path as a route declares it; ``None`` if there is no such route."""
        handlers = self._by_path.get(template)
        return None if handlers is None else handlers.get(method, handlers[OTHER_METHODS])

    def template_of(self, path: str) -> str:
        """Return the path as a route declares it, with ``{name}`` for its variable part; empty if no route has it."""
        if path in self._by_path:
            return path
        return next((template for template, pattern in self._patterns.items() if pattern.fullmatch(path)), "")

    def not_found(self, path: str) -> NotFoundError:
        """Return the error for a path that no route has. ``near`` is a route of the clients that request such paths."""
        shown = path[:MAX_PATH]
        meant = get_close_matches(path, self._by_path, 1, LIKENESS) if shown == path else []
        near = [*meant, max(self._by_path, key=lambda route: len(commonpath([route, f"/{shown}"])))][0]
        if GENERATING.search(shown):
            return NotFoundError(no_generation(shown), near=near)
        hint = f"; did you mean {near}?" if meant else ". GET /docs lists the routes."
        return NotFoundError(f"No route {shown}{hint}", near=near)

    def path_of_route(self, path: str) -> str:
        """Return a path as its route spells it: single slashes, none at the end, one /v1; else it is unchanged."""
        if not path or path in self._by_path:
            return path
        stripped = path.rstrip("/")
        if template := self.template_of(path):
            # A slash after a route's end, which would belong to a name otherwise.
            return stripped if self.template_of(stripped) not in ("", template) else path
        plain = SLASHES.sub("/", path).rstrip("/") or "/"
        if self.template_of(plain):
            return plain
        single = plain.removeprefix("/v1")
        if not (plain.startswith(DOUBLED) and (template := self.template_of(single))):
            return path
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a client requests /v1%s instead of %s: its base URL must not end in /v1", template, template
            )
        return single


def _below_root_path(path: str, root_path: str) -> str:
    """Return the path as routes have it: below the root path, with one leading slash; empty if outside."""
    if root_path and not path.startswith(root_path.rstrip("/") + "/"):
        return ""
    return "/" + path.removeprefix(root_path).lstrip("/")


def name_in_path(template: str, path: str) -> str | None:
    """Return the part of a path in the place of ``{name}`` in its route's path; ``None`` if that has no such part."""
    before, place, after = template.partition(PLACE)
    name = path.removeprefix(before).removesuffix(after)
    return (name.rstrip("/") if after else name) if place else None


def fixed(response: HttpResponse) -> Handler:
    """Return a handler that always gives the same response."""

    async def respond(_: HttpRequest) -> HttpResponse:
        return response

    return respond


async def _refuse_method(methods: Sequence[str], request: HttpRequest) -> NoReturn:
    raise method_not_allowed(request, methods)


def method_not_allowed(request: HttpRequest, methods: Sequence[str]) -> MethodNotAllowedError:
    """Return the error for a request with another method than its route accepts."""
    usual = [each for each in methods if each not in ("HEAD", "OPTIONS")]
    sent = request.scope.get("method", "WebSocket")
    message = f"{request.scope['path'][:MAX_PATH]} accepts {listed(usual)}, not {sent}."
    return MethodNotAllowedError(message, allowed=", ".join(methods))


def no_generation(path: str) -> str:
    """Return the message to clients that request text."""
    routes = ("/api/embed", "/api/rerank") if path.startswith("/api/") else ("/v1/embeddings", "/v1/rerank")
    return "This server does not generate text. It serves embeddings ({}) and rankings ({}).".format(*routes)
