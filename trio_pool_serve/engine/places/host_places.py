"""The places on other machines: links to their engines, each of which joins the model that it computes."""

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
"""Interval at which links are updated to the hosts and their addresses: other processes add and drain hosts, too."""

LINK_PAUSE_S = 1.0
"""Pause before a link restarts after an unexpected error."""


@define(eq=False)
class HostPlace:
    """The place of one engine, while its address belongs to a host."""

    hosts: list[HostAddress]
    """The hosts with this address, as they were given; a name may have several addresses."""
    address: HostAddress
    link: RemoteDevice = field(init=False)
    is_wanted: bool = field(default=True, init=False)
    """Whether its address still belongs to a host."""
    model: str | None = field(default=None, init=False)
    """The name of the model that it computes, while it is ready."""
    digest: ModelDigest = field(default=ModelDigest("", ""), init=False)
    """Digest of the files that its engine has loaded."""
    scope: trio.CancelScope = field(init=False, factory=trio.CancelScope)

    @property
    def state(self) -> Literal["connecting", "draining", "stalled", "ready"]:
        """The state of the link. A host is never failed: nothing is known about what restarts it."""
        if self.link.hello is None:
            return "connecting"
        if not self.link.takes_rows:
            return "draining"
        return "stalled" if self.link.stall_reason else "ready"

    @property
    def names(self) -> set[str]:
        """The names that operators may use for it."""
        return {str(self.address), *map(str, self.hosts)}

    def described(self) -> dict[str, Any]:
        """Return its entry of ``/engine_hosts``."""
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
    """Keeps a link to each engine of the hosts, and gives it to the model with the same files as the engine."""

    listed: HostList
    keys: LinkKeys
    scheduling: SchedulingConfig
    workers: dict[str, RemoteWorkers] = field(init=False, factory=dict)
    """The workers of this server's models, by name."""
    places: dict[HostAddress, HostPlace] = field(init=False, factory=dict)
    """By resolved address, in order of arrival."""
    _digests: dict[str, ModelDigest] = field(init=False, factory=dict)
    """Digests of the models' files here, by name; without weights if these are not here."""
    _knows_models: trio.Event = field(init=False, factory=trio.Event)
    """Set once all models are in ``_digests``."""

    def read(self) -> None:
        """Read the files of the settings. Blocks. Raises ``ValueError`` or ``OSError``."""
        self.keys.read()
        self.listed.read()

    def serve(self, name: str, digest: ModelDigest) -> None:
        """Use engines with the same files for this model. No link is made before all models are named."""
        self._digests[name] = digest
        if len(self._digests) == len(self.workers):
            self._knows_models.set()

    async def run(self) -> None:
        """Connect to the hosts, including hosts that join later, forever. Cancellation: at once, like the links."""
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
        """Start and end links so that there is one for each address of the hosts."""
        wanted = self.listed.addresses(nursery)
        for address, place in list(self.places.items()):
            place.is_wanted = address in wanted
            place.hosts = wanted.get(address, place.hosts)
            if not place.is_wanted and not place.link.waiting_rows:
                place.link.is_draining = True  # the link exists until its task runs
                place.scope.cancel(reason="its address does not belong to a host any more")
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
        """Update for each link whether it is draining."""
        for place in self.places.values():
            place.link.is_draining = not place.is_wanted or not place.names.isdisjoint(self.listed.drained)

    async def _keep(self, place: HostPlace) -> None:
        with place.scope:
            while True:
                try:
                    await place.link.run()
                except Exception:  # one engine's error must not end the links to the others
                    logger.exception("the link to the engine at %s has failed", place.address)
                await trio.sleep(LINK_PAUSE_S)

    def _use(self, place: HostPlace, link: RemoteDevice, hello: Hello) -> None:
        """Give a ready link to the model that its engine computes. Raises ``LinkRefusedError``."""
        for other in self.places.values():
            known = other.link.hello
            if hello.identity and other is not place and known is not None and known.identity == hello.identity:
                raise LinkRefusedError(f"it is the engine at {other.address}")
        theirs = ModelDigest(hello.files, hello.weights)
        for model, ours in self._digests.items():
            # Also compare with engines that compute it: the weights may not be here.
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
        raise LinkRefusedError(f"this server does not serve its model {hello.model}")

    def _lose(self, place: HostPlace, link: RemoteDevice) -> None:
        model, place.model = place.model, None
        assert model is not None  # noqa: S101  (it was ready)
        self.workers[model].lose(link)

    def add(self, name: str) -> None:
        """Make all processes of the server use a host: a new one, or one that was drained under any of its names.

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
            name = str(HostAddress.parse(name))  # as written by ``add``
        known = [place.names for place in self.places.values()]
        if name not in {str(host) for host in self.listed.all}.union(*known):
            raise NotFoundError(f"This server has no host {name[:200]}.")
        self.listed.change("drain", name)
        self._drain()

    def described(self) -> list[dict[str, Any]]:
        """Return the hosts as this process sees them, each with the engines at its addresses."""
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
