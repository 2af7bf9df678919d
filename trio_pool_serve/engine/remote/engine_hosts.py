"""The engines on other machines: which there are, and the links to them."""

import fcntl
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec
import trio
from attrs import define, field

from trio_pool_serve.config import HostsConfig, SchedulingConfig
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.remote.connectors import HostAddress, HostConnector
from trio_pool_serve.engine.remote.keys import LinkKeys, LinkRefusedError
from trio_pool_serve.engine.remote.link import Link
from trio_pool_serve.engine.remote.process_engine import ProcessEngine
from trio_pool_serve.errors import InvalidRequestError, NotFoundError
from trio_pool_serve.telemetry.gauges import GAUGES
from trio_pool_serve.telemetry.metrics import PREFIX
from trio_pool_serve.telemetry.snapshots import Family
from trio_pool_serve.types import ModelDigest

logger = logging.getLogger(__name__)

CHANGES_S = 0.5
"""How often a process looks whether another process of the server has drained or added a host."""

RESOLVE_S = 5.0
"""How often names are resolved again."""

RESOLVING_AT_ONCE = 16
"""Names that are resolved at a time, each in a thread that cannot be interrupted."""

AGAIN_S = 2.0
"""Pause after a link has failed in a way that it should not."""

MAX_HOSTS = 10_000
"""Addresses in all: a link is a few tasks."""

CHANGES_FILE = "hosts.json"

FIRST_POSITION = 1_000_000
"""Behind all links of this machine."""


class HostChanges(msgspec.Struct):
    """What was added and drained since the start, by the addresses that were given."""

    added: list[str] = []
    drained: list[str] = []


def parse_hosts(text: str) -> list[HostAddress]:
    """Return the addresses of lines, or of a list with commas; ``#`` begins a comment. Raises ``ValueError``."""
    lines = (line.partition("#")[0] for line in text.splitlines())
    return [HostAddress.parse(each) for line in lines for each in line.split(",") if each.strip()]


def read_hosts(setting: str) -> list[HostAddress]:
    """Return the addresses of ``--engine-hosts``. Blocks. Raises ``ValueError`` or ``OSError``."""
    path = Path(setting)
    is_file = "," not in setting and path.is_file()
    hosts = parse_hosts(path.read_text() if is_file else setting)
    if len(hosts) > MAX_HOSTS:
        raise ValueError(f"--engine-hosts: {len(hosts)} hosts are more than {MAX_HOSTS}.")
    return hosts


@define(eq=False)
class Served:
    """A model of this server, and the digest of its files here."""

    name: str
    engine: ProcessEngine
    files: ModelDigest
    """Of the files here; without weights if they are not here."""
    digest: ModelDigest
    """With the weights of the engines that compute it."""


@define(eq=False)
class HostLink:
    """The link to one engine, for as long as its address is one of the hosts'."""

    hosts: list[HostAddress]
    """What it is the address of, as that was given; a name may stand for several."""
    address: HostAddress
    link: Link = field(init=False)
    is_wanted: bool = field(default=True, init=False)
    """Whether its address is still one of the hosts'."""
    served: Served | None = field(default=None, init=False)
    """The model that it computes, while it is ready."""
    scope: trio.CancelScope = field(init=False, factory=trio.CancelScope)

    def is_of(self, identity: str) -> bool:
        """Return whether it is connected to the engine of that identity."""
        return self.link.hello is not None and bool(identity) and self.link.hello.identity == identity

    @property
    def names(self) -> set[str]:
        """What it may be called by those who operate the server."""
        return {str(self.address), *map(str, self.hosts)}


@define(eq=False)
class EngineHosts:
    """Keeps a link to each engine of ``--engine-hosts``, and gives it to the model whose files the engine has.

    ``folder`` is that of the server's processes: hosts that are added or drained are in a file there, for all of them.
    """

    config: HostsConfig
    keys: LinkKeys
    folder: Path
    scheduling: SchedulingConfig
    engines: dict[str, ProcessEngine] = field(init=False, factory=dict)
    """Of the models of this server, by name."""
    links: dict[HostAddress, HostLink] = field(init=False, factory=dict)
    """By resolved address, in order of arrival."""
    _configured: list[HostAddress] = field(init=False, factory=list)
    _changes: HostChanges = field(init=False, factory=HostChanges)
    _changes_version: tuple[int, int] = field(default=(0, 0), init=False)
    """Of the file that was read last."""
    _served: list[Served] = field(init=False, factory=list)
    _knows_models: trio.Event = field(init=False, factory=trio.Event)
    """Set once all models are in ``_served``."""
    _changed: trio.Event = field(init=False, factory=trio.Event)
    """Set when the hosts or their addresses have changed."""
    _resolve_now: trio.Event = field(init=False, factory=trio.Event)
    _known: set[HostAddress] = field(init=False, factory=set)
    """The hosts as of the last look."""
    _resolved: dict[HostAddress, list[HostAddress]] = field(init=False, factory=dict)
    """The addresses of each name that is resolved now and then; empty before the first time."""
    _resolving: trio.CapacityLimiter = field(init=False, factory=lambda: trio.CapacityLimiter(RESOLVING_AT_ONCE))
    _positions: int = field(default=FIRST_POSITION, init=False)

    def read(self) -> None:
        """Read the files of the settings. Blocks. Raises ``ValueError`` or ``OSError``."""
        self.keys.read()
        self._configured = read_hosts(self.config.engine_hosts)

    def serve(self, name: str, digest: ModelDigest) -> None:
        """Have engines with the same files compute for the model of that name. No link is made before all are named."""
        self._served.append(Served(name, self.engines[name], digest, digest))
        if len(self._served) == len(self.engines):
            self._knows_models.set()

    def look_again(self) -> None:
        """Use what was read anew; resolve all names now."""
        self._changed.set()
        self._resolve_now.set()
        self._resolve_now = trio.Event()

    async def run(self) -> None:
        """Connect to the hosts, also to those that join later, forever. Cancellation: at once, as that of the links."""
        await self._knows_models.wait()
        async with trio.open_nursery() as nursery:
            while True:
                changed = self._changed = trio.Event()
                self._update(nursery)
                with trio.move_on_after(RESOLVE_S):
                    while not changed.is_set() and self._version() == self._changes_version:
                        with trio.move_on_after(CHANGES_S):
                            await changed.wait()

    def _update(self, nursery: trio.Nursery) -> None:
        """Have a link to each address of the hosts, and to no other."""
        self._read_changes()
        wanted: dict[HostAddress, list[HostAddress]] = {}
        hosts = self._hosts()
        self._known = {*hosts}
        for host in hosts:
            if _is_numeric(host.host):
                wanted.setdefault(host, []).append(host)
                continue
            if host not in self._resolved:
                self._resolved[host] = []
                nursery.start_soon(self._keep_resolving, host)
            for address in self._resolved[host]:
                wanted.setdefault(address, []).append(host)
        for address, known in list(self.links.items()):
            known.is_wanted = address in wanted
            known.hosts = wanted.get(address, known.hosts)
            if not known.is_wanted and not known.link.waiting_rows and not known.link.scopes:
                known.link.is_draining = True  # it is there until it is scheduled to end
                known.scope.cancel(reason="its address is none of the hosts' any more")
                del self.links[address]
        for address, of_address in wanted.items():
            if address not in self.links and len(self.links) < MAX_HOSTS:
                nursery.start_soon(self._keep, self._add(address, of_address))
        self._drain()

    def _drain(self) -> None:
        """Have each link get rows or not, as is wanted by now."""
        for known in self.links.values():
            known.link.is_draining = not known.is_wanted or not known.names.isdisjoint(self._changes.drained)

    def _hosts(self) -> list[HostAddress]:
        """Return all hosts, in order and each once."""
        return list(dict.fromkeys([*self._configured, *map(HostAddress.parse, self._changes.added)]))

    async def _keep_resolving(self, host: HostAddress) -> None:
        """Resolve a name now and then while it is one of the hosts; it keeps its addresses when that fails."""
        failure = ""
        while host in self._known:
            resolve_now = self._resolve_now
            try:
                async with self._resolving:
                    results = await trio.socket.getaddrinfo(host.host, host.port, type=trio.socket.SOCK_STREAM)
            # UnicodeError: the name cannot be encoded for the DNS. RuntimeError: no thread can be started.
            except (OSError, UnicodeError, RuntimeError) as error:
                if str(error) != failure:  # not at each attempt
                    failure = str(error)
                    logger.warning("the host %s cannot be resolved: %s", host, failure)
            else:
                failure = ""
                addresses = [HostAddress(str(resolved[0]), int(resolved[1])) for *_, resolved in results]
                if {*addresses} != {*self._resolved[host]}:
                    self._resolved[host] = addresses
                    self._changed.set()
            with trio.move_on_after(RESOLVE_S):
                await resolve_now.wait()
        del self._resolved[host]

    def _add(self, address: HostAddress, hosts: list[HostAddress]) -> HostLink:
        self._positions += 1
        added = self.links[address] = HostLink(hosts, address)
        connector = HostConnector(address, self.keys)
        use, lose = partial(self._use, added), partial(self._lose, added)
        times = self.scheduling
        added.link = Link(connector, use, lose, times.stall_timeout_s, times.max_queue_s, self._positions)
        return added

    async def _keep(self, added: HostLink) -> None:
        with added.scope:
            while True:
                try:
                    await added.link.run()
                except Exception:  # what one engine causes must not end the links to the others
                    logger.exception("the link to the engine at %s has failed", added.address)
                await trio.sleep(AGAIN_S)

    def _use(self, host: HostLink, link: Link) -> None:
        """Give a link that is ready to the model that its engine computes. Raises ``LinkRefusedError``."""
        assert link.hello is not None  # noqa: S101  (it is ready)
        if same := [known for known in self.links.values() if known is not host and known.is_of(link.hello.identity)]:
            raise LinkRefusedError(f"it is the engine at {same[0].address}")
        theirs = ModelDigest(link.hello.files, link.hello.weights)
        for served in self._served:
            if theirs.agrees_with(served.digest):
                served.digest = served.digest.completed_by(theirs)
                host.served = served
                served.engine.add_ready(link)
                logger.info("the engine at %s computes %s", link.connector.name, served.name)
                return
        if link.hello.model in [served.name for served in self._served]:
            raise LinkRefusedError(f"its files or settings for {link.hello.model} are not those of this server")
        raise LinkRefusedError(f"its model {link.hello.model} is none of this server's")

    def _lose(self, host: HostLink, link: Link, lost: list[QueueEntry]) -> None:
        served, host.served = host.served, None
        assert served is not None  # noqa: S101  (it was ready)
        if not any(known.served is served for known in self.links.values()):
            served.digest = served.files  # the next engine's weights may be other ones
        served.engine.lose(link, lost)

    @property
    def _changes_path(self) -> Path:
        return self.folder / CHANGES_FILE

    def _version(self) -> tuple[int, int]:
        """Return what tells one file of changes from the one before, also of the same moment."""
        try:
            found = self._changes_path.stat()
        except FileNotFoundError:
            return 0, 0
        return found.st_mtime_ns, found.st_ino

    def _read_changes(self) -> None:
        version = self._version()
        if version not in (self._changes_version, (0, 0)):
            self._changes = msgspec.json.decode(self._changes_path.read_bytes(), type=HostChanges)
            self._changes_version = version

    def _write_changes(self, change: Callable[[HostChanges], None]) -> None:
        """Change the file that all processes of the server read. Blocks, but for moments."""
        with (self.folder / f"{CHANGES_FILE}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._read_changes()
            change(self._changes)
            new = self._changes_path.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(self._changes))
            new.replace(self._changes_path)
        self._drain()
        self._changed.set()

    def add(self, name: str) -> None:
        """Have all processes of the server use a host: one more, or one that was drained.

        Raises ``InvalidRequestError``.
        """
        try:
            host = HostAddress.parse(name)
        except ValueError as error:
            raise InvalidRequestError(f"The host {error}.", param="host") from error

        def change(changes: HostChanges) -> None:
            links = [known for known in self.links.values() if str(host) in known.names]
            names = {str(host)}.union(*(known.names for known in links))
            changes.drained = [each for each in changes.drained if each not in names]
            if host not in self._hosts() and not links:
                changes.added.append(str(host))

        if len(self._hosts()) >= MAX_HOSTS:
            raise InvalidRequestError(f"There are {MAX_HOSTS} hosts already.", param="host")
        self._write_changes(change)

    def drain(self, name: str) -> None:
        """Have all processes of the server send no more rows to a host. Raises ``NotFoundError``."""
        with suppress(ValueError):
            name = str(HostAddress.parse(name))  # as ``add`` has written it
        names = {str(host) for host in self._hosts()}.union(*(known.names for known in self.links.values()))
        if name not in names:
            raise NotFoundError(f"The host {name[:200]} is none of this server's.")

        def change(changes: HostChanges) -> None:
            if name not in changes.drained:
                changes.drained.append(name)

        self._write_changes(change)

    def described(self) -> list[dict[str, Any]]:
        """Return the hosts as this process knows them: for each the engines at its addresses."""
        of_host: dict[HostAddress, list[dict[str, Any]]] = {host: [] for host in self._hosts()}
        for known in self.links.values():
            of_host.setdefault(known.hosts[0], []).append(_described(known))
        return [{"host": str(host), "engines": engines} for host, engines in of_host.items()]

    def families(self) -> list[Family]:
        """Return the metrics of the links of this process."""
        name = f"{PREFIX}link"
        samples = [
            (name, {"address": str(address), "of": of}, float(value))
            for address, known in self.links.items()
            for of, value in (
                ("connected", known.link.hello is not None),
                ("waiting_rows", known.link.waiting_rows),
                ("waiting_tokens", known.link.own_tokens),
                ("losses", known.link.losses),
            )
        ]
        return [Family(name, GAUGES["link"].text, "gauge", samples)]


def _described(known: HostLink) -> dict[str, Any]:
    link, hello = known.link, known.link.hello
    return {
        "address": str(known.address),
        "state": link.state,
        "reason": link.failure or link.stall_reason,
        "model": None if known.served is None else known.served.name,
        "zone": None if hello is None else hello.zone,
        "waiting_rows": link.waiting_rows,
        "waiting_tokens": link.waiting_tokens,
        "tokens_per_s": round(link.tokens_per_s, 1),
        "losses": link.losses,
    }


def _is_numeric(host: str) -> bool:
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
