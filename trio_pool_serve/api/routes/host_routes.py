"""``/engine_hosts``: the engines on other machines, for those who operate the server."""

import msgspec

from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.api.http.route_table import Routes
from trio_pool_serve.engine.places.host_places import HostPlaces
from trio_pool_serve.errors import InvalidRequestError, PermissionDeniedError
from trio_pool_serve.service import Service

HOSTS_PATH, DRAIN_PATH = "/engine_hosts", "/engine_hosts/drain"

HOST_ROUTES = (("GET", HOSTS_PATH), ("POST", HOSTS_PATH), ("POST", DRAIN_PATH))

MAX_BODY_BYTES = 4096


class HostRequest(msgspec.Struct, frozen=True):
    """The body of requests that change something."""

    host: str


def host_routes(service: Service, hosts: HostPlaces) -> Routes:
    """Return the routes over the hosts of a service; those that change something need an API key in any case."""

    async def host_of(request: HttpRequest) -> str:
        if not service.api_keys.are_needed:
            raise PermissionDeniedError("Hosts can be changed by a server with API keys only: see --api-key.")
        body = await request.body.take_small(MAX_BODY_BYTES, service.config.time_limits.client_timeout_s)
        try:
            return msgspec.json.decode(body, type=HostRequest).host
        except (msgspec.MsgspecError, ValueError) as error:
            raise InvalidRequestError(f'The body is not {{"host": "HOST:PORT"}}: {error}') from error

    async def list_hosts(_: HttpRequest) -> HttpResponse:
        return HttpResponse.json({"hosts": hosts.described()})

    async def add(request: HttpRequest) -> HttpResponse:
        hosts.add(await host_of(request))
        return HttpResponse.json({"hosts": hosts.described()})

    async def drain(request: HttpRequest) -> HttpResponse:
        hosts.drain(await host_of(request))
        return HttpResponse.json({"hosts": hosts.described()})

    return {("GET", HOSTS_PATH): list_hosts, ("POST", HOSTS_PATH): add, ("POST", DRAIN_PATH): drain}
