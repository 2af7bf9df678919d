"""The engines on other machines: which there are, and the links to them."""

import fcntl
import logging
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec
import trio
from attrs import define, field

from trio_pool_serve.config import HostsConfig
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.remote.connectors import HostAddress, HostConnector
from trio_pool_serve.engine.remote.keys import LinkKeys, LinkRefusedError
from trio_pool_serve.engine.remote.link import Link
from trio_pool_serve.engine.remote.process_engine import ProcessEngine
from trio_pool_serve.errors import InvalidRequestError, NotFoundError
from trio_pool_serve.telemetry.metrics import PREFIX
from trio_pool_serve.telemetry.snapshots import Family
from trio_pool_serve.types import ModelDigest

logger = logging.getLogger(__name__)

CHANGES_S = 0.5
"""How often a process looks whether another process of the server has drained or added a host."""

RESOLVE_S = 5.0
"""How often names are resolved again."""

RESOLVE_TIMEOUT_S = 5.0

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
    digest: ModelDigest


@define(eq=False)
class HostLink:
    """The link to one engine, for as long as its address is one of the hosts'."""

    host: HostAddress
    """As it was given; a name may stand for several."""
    address: HostAddress
    link: Link = field(init=False)
    is_wanted: bool = field(default=True, init=False)
    """Whether its address is still one of the hosts'."""
    served: Served | None = field(default=None, init=False)
    """The model that it computes, while it is ready."""
    scope: trio.CancelScope = field(init=False, factory=trio.CancelScope)

    @property
    def names(self) -> set[str]:
        """What it may be called by those who operate the server."""
        return {str(self.host), str(self.address)}


@define(eq=False)
class EngineHosts:
    """Keeps a link to each engine of ``--engine-hosts``, and gives it to the model whose files the engine has.

    ``folder`` is that of the server's processes: hosts that are added or drained are in a file there, for all of them.
    """

    config: HostsConfig
    keys: LinkKeys
    folder: Path
    stall_timeout_s: float
    engines: dict[str, ProcessEngine] = field(init=False, factory=dict)
    """Of the models of this server, by name."""
    links: dict[HostAddress, HostLink] = field(init=False, factory=dict)
    """By resolved address, in order of arrival."""
    _configured: list[HostAddress] = field(init=False, factory=list)
    _changes: HostChanges = field(init=False, factory=HostChanges)
    _changes_at: int = field(default=0, init=False)
    """Modification time of the file."""
    _served: list[Served] = field(init=False, factory=list)
    _knows_models: trio.Event = field(init=False, factory=trio.Event)
    """Set once all models are in ``_served``."""
    _refresh: trio.Event = field(init=False, factory=trio.Event)
    _unresolved: set[HostAddress] = field(init=False, factory=set)
    """Names that could not be resolved the last time."""
    _positions: int = field(default=FIRST_POSITION, init=False)

    def read(self) -> None:
        """Read the files of the settings. Blocks. Raises ``ValueError`` or ``OSError``."""
        self.keys.read()
        self._configured = read_hosts(self.config.engine_hosts)

    def serve(self, name: str, digest: ModelDigest) -> None:
        """Have engines with the same files compute for the model of that name. No link is made before all are named."""
        self._served.append(Served(name, self.engines[name], digest))
        if len(self._served) == len(self.engines):
            self._knows_models.set()

    def look_again(self) -> None:
        """Use what was read anew; resolve all names now."""
        self._refresh.set()

    async def run(self) -> None:
        """Connect to the hosts, also to those that join later, forever. Cancellation: at once, as that of the links."""
        await self._knows_models.wait()
        async with trio.open_nursery() as nursery:
            while True:
                await self._update(nursery)
                self._refresh = trio.Event()
                with trio.move_on_after(RESOLVE_S):
                    while not self._refresh.is_set() and not self._has_changes():
                        with trio.move_on_after(CHANGES_S):
                            await self._refresh.wait()

    async def _update(self, nursery: trio.Nursery) -> None:
        self._read_changes()
        wanted: dict[HostAddress, HostAddress] = {}
        async with trio.open_nursery() as resolving:
            for host in self._hosts():
                resolving.start_soon(self._resolve, host, wanted)
        for address, known in list(self.links.items()):
            known.is_wanted = address in wanted
            if not known.is_wanted and not known.link.waiting_rows and not known.link.scopes:
                known.scope.cancel(reason="its address is none of the hosts' any more")
                del self.links[address]
        for address, host in wanted.items():
            if address not in self.links and len(self.links) < MAX_HOSTS:
                nursery.start_soon(self._keep, self._add(address, host))
        self._drain()

    def _drain(self) -> None:
        """Have each link get rows or not, as is wanted by now."""
        for known in self.links.values():
            known.link.is_draining = not known.is_wanted or not known.names.isdisjoint(self._changes.drained)

    def _hosts(self) -> list[HostAddress]:
        """Return all hosts, in order and each once."""
        return list(dict.fromkeys([*self._configured, *map(HostAddress.parse, self._changes.added)]))

    async def _resolve(self, host: HostAddress, found: dict[HostAddress, HostAddress]) -> None:
        """Add the addresses of a host; of a name that cannot be resolved now, those that it had."""
        if _is_numeric(host.host):
            found.setdefault(host, host)
            return
        with trio.move_on_after(RESOLVE_TIMEOUT_S):
            try:
                results = await trio.socket.getaddrinfo(host.host, host.port, type=trio.socket.SOCK_STREAM)
            except OSError as error:
                self._note_unresolved(host, error)
            else:
                self._unresolved.discard(host)
                for *_, resolved in results:
                    found.setdefault(HostAddress(str(resolved[0]), int(resolved[1])), host)
                return
        for address, known in self.links.items():
            if known.host == host:
                found.setdefault(address, host)

    def _note_unresolved(self, host: HostAddress, error: OSError) -> None:
        if host not in self._unresolved:  # not at each attempt
            logger.warning("the host %s cannot be resolved: %s", host, error)
            self._unresolved.add(host)

    def _add(self, address: HostAddress, host: HostAddress) -> HostLink:
        self._positions += 1
        added = self.links[address] = HostLink(host, address)
        connector = HostConnector(address, self.keys, self.config.link_timeout_s)
        use, lose = partial(self._use, added), partial(self._lose, added)
        added.link = Link(connector, use, lose, self.stall_timeout_s, self._positions)
        return added

    async def _keep(self, added: HostLink) -> None:
        with added.scope:
            await added.link.run()

    def _use(self, host: HostLink, link: Link) -> None:
        """Give a link that is ready to the model that its engine computes. Raises ``LinkRefusedError``."""
        assert link.hello is not None  # noqa: S101  (it is ready)
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
        served.engine.lose(link, lost)

    @property
    def _changes_path(self) -> Path:
        return self.folder / CHANGES_FILE

    def _has_changes(self) -> bool:
        try:
            return self._changes_path.stat().st_mtime_ns != self._changes_at
        except FileNotFoundError:
            return False

    def _read_changes(self) -> None:
        if self._has_changes():
            self._changes_at = self._changes_path.stat().st_mtime_ns
            self._changes = msgspec.json.decode(self._changes_path.read_bytes(), type=HostChanges)

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
        self._refresh.set()

    def add(self, name: str) -> None:
        """Have all processes of the server use a host: one more, or one that was drained.

        Raises ``InvalidRequestError``.
        """
        try:
            host = HostAddress.parse(name)
        except ValueError as error:
            raise InvalidRequestError(f"The host {error}.", param="host") from error

        def change(changes: HostChanges) -> None:
            changes.drained = [each for each in changes.drained if each != str(host)]
            is_known = host in self._hosts() or any(str(host) in known.names for known in self.links.values())
            if not is_known:
                changes.added.append(str(host))

        if len(self._hosts()) >= MAX_HOSTS:
            raise InvalidRequestError(f"There are {MAX_HOSTS} hosts already.", param="host")
        self._write_changes(change)

    def drain(self, name: str) -> None:
        """Have all processes of the server send no more rows to a host. Raises ``NotFoundError``."""
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
            of_host.setdefault(known.host, []).append(_described(known))
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
        return [
            Family(name, "Links to engines on other machines, the sum of those of all API processes", "gauge", samples)
        ]


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
