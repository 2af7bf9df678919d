"""The links to engines on other machines, each of which joins the model that it computes."""

import logging
from contextlib import suppress
from functools import partial
from typing import Any

import trio
from attrs import define, field

from trio_pool_serve.config import SchedulingConfig
from trio_pool_serve.engine.engine import ModelQueue
from trio_pool_serve.engine.places.host_list import MAX_HOSTS, HostList
from trio_pool_serve.engine.places.host_state import HostPlace
from trio_pool_serve.engine.remote.connectors import HostAddress, host_connector
from trio_pool_serve.engine.remote.greeting import LinkKeys
from trio_pool_serve.engine.remote.link import LinkRefusedError
from trio_pool_serve.engine.remote.remote_device import RemoteDevice
from trio_pool_serve.engine.remote.remote_workers import RemoteWorkers
from trio_pool_serve.engine.remote.wire import Hello
from trio_pool_serve.errors import InvalidRequestError, NotFoundError, require_request
from trio_pool_serve.storage.file_digests import ModelDigest
from trio_pool_serve.telemetry.gauges import GAUGES
from trio_pool_serve.telemetry.snapshots import Family, gauge_family

logger = logging.getLogger(__name__)

# Polled rather than sent by the parent process: a server with one API process has no parent, and an API process that is
# replaced needs all earlier changes, so that the file would be needed in any case.
CHANGES_S = 0.5
"""Interval at which links are updated to the hosts and their addresses: other API processes change them, too."""

LINK_PAUSE_S = 1.0
"""Pause before a link restarts after an unexpected error."""


@define(eq=False)
class HostPlaces:
    """Keeps a link to each engine of the hosts, and gives it to the model with the same files as the engine."""

    listed: HostList
    keys: LinkKeys
    scheduling: SchedulingConfig
    workers: dict[str, RemoteWorkers] = field(init=False, factory=dict)
    """The workers of this server's models, by name."""
    places: dict[HostAddress, HostPlace] = field(init=False, factory=dict)
    """The places by resolved address, in order of arrival."""
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
            while True:
                self.listed.read_changes()
                if self.listed.has_changed or not all(place.is_wanted for place in self.places.values()):
                    self.listed.has_changed = False
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
                connector, use = host_connector(address, self.keys), partial(self._use, place)
                place.link = RemoteDevice(connector, use, self.scheduling.stall_timeout_s)
                nursery.start_soon(self._keep, place)
        self._drain()

    def _drain(self) -> None:
        """Update for each link whether it is draining."""
        for place in self.places.values():
            place.link.is_draining = not place.is_wanted or not place.names.isdisjoint(self.listed.drained)
        for workers in self.workers.values():
            workers.dispatcher.note_room()  # a link that drains no more has room

    async def _keep(self, place: HostPlace) -> None:
        with place.scope:
            while True:
                try:
                    await place.link.run()
                except Exception:  # one engine's error must not end the links to the others
                    logger.exception("the link to the engine at %s failed", place.address)
                await trio.sleep(LINK_PAUSE_S)

    def _use(self, place: HostPlace, hello: Hello) -> ModelQueue:
        """Return the queue of the model that a ready engine computes. Raises ``LinkRefusedError``."""
        ready = [(other, other.link.hello) for other in self.places.values() if other.link.hello is not None]
        for other, known in ready:
            if hello.identity and known.identity == hello.identity:
                raise LinkRefusedError(f"it is the same engine as at {other.address}")
        for model, ours in self._digests.items():
            peers = [hello, *(known for other, known in ready if other.loaded == model)]
            theirs, *others = [ModelDigest(each.files, each.weights) for each in peers]
            # Engines that compute the model are compared, too: the weights may not be here.
            if all(theirs.agrees_with(known) for known in [ours, *others]):
                place.loaded = model
                logger.info("the engine at %s computes %s in %s", place.address, model, hello.dtype)
                fingerprints = sorted({each.fingerprint for each in peers})
                if len(fingerprints) > 1:
                    listed = ", ".join(fingerprints)
                    logger.warning("the engines of %s compute with different fingerprints: %s", model, listed)
                return self.workers[model].queue
        if hello.model in self.workers:
            raise LinkRefusedError(f"its files or settings for {hello.model} differ from this server's")
        raise LinkRefusedError(f"it computes {hello.model}, which this server does not serve")

    def add(self, name: str) -> None:
        """Make all processes of the server use a host: a new one, or one that was drained under any of its names.

        Raises ``InvalidRequestError``.
        """
        try:
            host = HostAddress.parse(name)
        except ValueError as error:
            raise InvalidRequestError(f"The host {error}.", param="host") from error
        known = [place.names for place in self.places.values() if str(host) in place.names]
        is_new = not known and host not in self.listed.all
        require_request(
            not is_new or len(self.listed.all) < MAX_HOSTS, f"The limit of {MAX_HOSTS} hosts is reached.", param="host"
        )
        self.listed.change("add" if is_new else "use", *{str(host)}.union(*known))
        self._drain()

    def drain(self, name: str) -> None:
        """Make all processes of the server send no more rows to a host. Raises ``NotFoundError``."""
        with suppress(ValueError):
            name = str(HostAddress.parse(name))  # as written by ``add``
        if name not in {str(host) for host in self.listed.all}.union(*(place.names for place in self.places.values())):
            raise NotFoundError(f"This server does not use a host {name[:200]}.")
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
        links = [place.described() | {"connected": place.link.hello is not None} for place in self.places.values()]
        samples = [({"address": each["address"], "of": of}, each[of]) for each in links for of in GAUGES["link"].of]
        return [gauge_family("link", samples)]
