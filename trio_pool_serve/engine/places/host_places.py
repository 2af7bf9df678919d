"""The places on other machines: the links to their engines, each of which joins the model that it computes."""

import logging
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import trio
from attrs import define, field

from trio_pool_serve.config import SchedulingConfig
from trio_pool_serve.engine.places.host_list import MAX_HOSTS, HostList
from trio_pool_serve.engine.remote.connectors import HostAddress, host_connector
from trio_pool_serve.engine.remote.keys import LinkKeys, LinkRefusedError
from trio_pool_serve.engine.remote.remote_device import RemoteDevice
from trio_pool_serve.engine.remote.remote_workers import RemoteWorkers
from trio_pool_serve.engine.remote.wire import Hello
from trio_pool_serve.errors import InvalidRequestError, NotFoundError
from trio_pool_serve.storage.file_digests import ModelDigest
from trio_pool_serve.telemetry.gauges import GAUGES
from trio_pool_serve.telemetry.metrics import PREFIX
from trio_pool_serve.telemetry.snapshots import Family

logger = logging.getLogger(__name__)

CHANGES_S = 0.5
"""How often the hosts and their addresses are compared with the links: other processes add and drain hosts, too."""

LINK_PAUSE_S = 1.0
"""Pause before a link that has ended by an unexpected error starts again."""


@define(eq=False)
class HostPlace:
    """The place of one engine, for as long as its address is one of the hosts'."""

    hosts: list[HostAddress]
    """What it is the address of, as that was given; a name may stand for several."""
    address: HostAddress
    link: RemoteDevice = field(init=False)
    is_wanted: bool = field(default=True, init=False)
    """Whether its address is still one of the hosts'."""
    model: str | None = field(default=None, init=False)
    """The name of the model that it computes, while it is ready."""
    digest: ModelDigest = field(default=ModelDigest("", ""), init=False)
    """Of the files that its engine has loaded."""
    scope: trio.CancelScope = field(init=False, factory=trio.CancelScope)

    @property
    def state(self) -> Literal["connecting", "draining", "stalled", "ready"]:
        """As the link knows it. A host never fails: nothing is known of what restarts it."""
        if self.link.hello is None:
            return "connecting"
        if not self.link.takes_rows:
            return "draining"
        return "stalled" if self.link.stall_reason else "ready"

    @property
    def names(self) -> set[str]:
        """What it may be called by those who operate the server."""
        return {str(self.address), *map(str, self.hosts)}

    def described(self) -> dict[str, Any]:
        """Return its part of ``/engine_hosts``."""
        link = self.link
        return {
            "address": str(self.address),
            "state": self.state,
            "reason": link.failure or link.stall_reason,
            "model": self.model,
            "dtype": None if link.hello is None else link.hello.dtype,
            "backend": None if link.hello is None else link.hello.backend,
            "zone": None if link.hello is None else link.zone,
            "waiting_rows": link.waiting_rows,
            "waiting_tokens": link.waiting_tokens,
            "tokens_per_s": round(link.tokens_per_s, 1),
            "losses": link.losses,
        }


@define(eq=False)
class HostPlaces:
    """Keeps a link to each engine of the hosts, and gives it to the model whose files the engine has."""

    listed: HostList
    keys: LinkKeys
    scheduling: SchedulingConfig
    workers: dict[str, RemoteWorkers] = field(init=False, factory=dict)
    """Of the models of this server, by name."""
    places: dict[HostAddress, HostPlace] = field(init=False, factory=dict)
    """By resolved address, in order of arrival."""
    _digests: dict[str, ModelDigest] = field(init=False, factory=dict)
    """Of each model's files here, by name; without weights if they are not here."""
    _knows_models: trio.Event = field(init=False, factory=trio.Event)
    """Set once all models are in ``_digests``."""

    def read(self) -> None:
        """Read the files of the settings. Blocks. Raises ``ValueError`` or ``OSError``."""
        self.keys.read()
        self.listed.read()

    def serve(self, name: str, digest: ModelDigest) -> None:
        """Use engines with the same files for the model of that name. No link is made before all models are named."""
        self._digests[name] = digest
        if len(self._digests) == len(self.workers):
            self._knows_models.set()

    async def run(self) -> None:
        """Connect to the hosts, also to those that join later, forever. Cancellation: at once, as that of the links."""
        await self._knows_models.wait()
        async with trio.open_nursery() as nursery:
            seen = -1
            while True:
                self.listed.read_changes()
                if seen != self.listed.version or not all(place.is_wanted for place in self.places.values()):
                    seen = self.listed.version
                    self._update(nursery)
                await trio.sleep(CHANGES_S)

    def _update(self, nursery: trio.Nursery) -> None:
        """Keep a link to each address of the hosts, and to no other."""
        wanted = self.listed.addresses(nursery)
        for address, place in list(self.places.items()):
            place.is_wanted = address in wanted
            place.hosts = wanted.get(address, place.hosts)
            if not place.is_wanted and not place.link.waiting_rows:
                place.link.is_draining = True  # it is there until it is scheduled to end
                place.scope.cancel(reason="its address is none of the hosts' any more")
                del self.places[address]
        for address, hosts in wanted.items():
            if address not in self.places:
                place = self.places[address] = HostPlace(hosts, address)
                use, lose = partial(self._use, place), partial(self._lose, place)
                place.link = RemoteDevice(
                    host_connector(address, self.keys), use, lose, self.scheduling.stall_timeout_s
                )
                nursery.start_soon(self._keep, place)
        self._drain()

    def _drain(self) -> None:
        """Set for each link whether it gets rows."""
        for place in self.places.values():
            place.link.is_draining = not place.is_wanted or not place.names.isdisjoint(self.listed.drained)

    async def _keep(self, place: HostPlace) -> None:
        with place.scope:
            while True:
                try:
                    await place.link.run()
                except Exception:  # what one engine causes must not end the links to the others
                    logger.exception("the link to the engine at %s has failed", place.address)
                await trio.sleep(LINK_PAUSE_S)

    def _use(self, place: HostPlace, link: RemoteDevice, hello: Hello) -> None:
        """Give a link that is ready to the model that its engine computes. Raises ``LinkRefusedError``."""
        for other in self.places.values():
            known = other.link.hello
            if hello.identity and other is not place and known is not None and known.identity == hello.identity:
                raise LinkRefusedError(f"it is the engine at {other.address}")
        theirs = ModelDigest(hello.files, hello.weights)
        for model, ours in self._digests.items():
            # The weights of engines that compute it count as well: they may not be here.
            of_engines = [other.digest for other in self.places.values() if other.model == model]
            if all(theirs.agrees_with(known) for known in [ours, *of_engines]):
                self.workers[model].add_ready(link, hello)
                place.model, place.digest = model, theirs
                logger.info("the engine at %s computes %s in %s", place.address, model, hello.dtype)
                if ", " in self.workers[model].computed_by.fingerprint:
                    logger.warning("the engines of %s differ: %s", model, self.workers[model].computed_by)
                return
        if hello.model in self.workers:
            raise LinkRefusedError(f"its files or settings for {hello.model} are not those of this server")
        raise LinkRefusedError(f"its model {hello.model} is none of this server's")

    def _lose(self, place: HostPlace, link: RemoteDevice) -> None:
        model, place.model = place.model, None
        assert model is not None  # noqa: S101  (it was ready)
        self.workers[model].lose(link)

    def add(self, name: str) -> None:
        """Make all processes of the server use a host: a new one, or one that was drained by any of its names.

        Raises ``InvalidRequestError``.
        """
        try:
            host = HostAddress.parse(name)
        except ValueError as error:
            raise InvalidRequestError(f"The host {error}.", param="host") from error
        if len(self.listed.all) >= MAX_HOSTS:
            raise InvalidRequestError(f"There are {MAX_HOSTS} hosts already.", param="host")
        known = [place.names for place in self.places.values() if str(host) in place.names]
        is_new = host not in self.listed.all and not known
        self.listed.change("add" if is_new else "use", *{str(host)}.union(*known))
        self._drain()

    def drain(self, name: str) -> None:
        """Make all processes of the server send no more rows to a host. Raises ``NotFoundError``."""
        with suppress(ValueError):
            name = str(HostAddress.parse(name))  # as ``add`` has written it
        known = [place.names for place in self.places.values()]
        if name not in {str(host) for host in self.listed.all}.union(*known):
            raise NotFoundError(f"The host {name[:200]} is none of this server's.")
        self.listed.change("drain", name)
        self._drain()

    def described(self) -> list[dict[str, Any]]:
        """Return the hosts as this process knows them: for each the engines at its addresses."""
        of_host: dict[HostAddress, list[dict[str, Any]]] = {host: [] for host in self.listed.all}
        for place in self.places.values():
            of_host.setdefault(place.hosts[0], []).append(place.described())
        return [{"host": str(host), "engines": engines} for host, engines in of_host.items()]

    def families(self) -> list[Family]:
        """Return the metrics of the links of this process."""
        name = f"{PREFIX}link"
        links = Family(name, GAUGES["link"].text, "gauge", [])
        for place in self.places.values():
            told = place.described() | {"connected": place.link.hello is not None}
            for of in ("connected", "waiting_rows", "waiting_tokens", "losses"):
                links.samples.append((name, {"address": told["address"], "of": of}, float(told[of])))
        return [links]
