"""The hosts of a server: configured, added and drained while it runs, and their resolved addresses."""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Literal

import trio
from attrs import define, field

from trio_pool_serve.engine.remote.connectors import HostAddress

logger = logging.getLogger(__name__)

RESOLVE_S = 5.0
"""Interval at which names are resolved again."""

RESOLVING_AT_ONCE = 16
"""Maximum names resolved at a time, each in a thread that cannot be interrupted."""

MAX_HOSTS = 10_000
"""Maximum addresses: a link is a few tasks."""


def read_hosts(setting: str) -> list[HostAddress]:
    """Return the addresses in ``--engine-hosts``, or in the file that it names. Blocks.

    Addresses are separated by lines or commas; ``#`` begins a comment. Raises ``ValueError`` or ``OSError``.
    """
    path = Path(setting)
    text = path.read_text() if "," not in setting and path.is_file() else setting
    lines = (line.partition("#")[0] for line in text.splitlines())
    hosts = [HostAddress.parse(each) for line in lines for each in line.split(",") if each.strip()]
    if len(hosts) > MAX_HOSTS:
        raise ValueError(f"--engine-hosts lists {len(hosts)} hosts; the limit is {MAX_HOSTS}.")
    return hosts


@define(eq=False)
class HostList:
    """The configured hosts, and the hosts added and drained since the start.

    Changes are lines of the file at ``path``, to which all API processes of the server append.
    """

    setting: str
    path: Path
    all: dict[HostAddress, None] = field(init=False, factory=dict)
    """All hosts in order, without duplicates."""
    has_changed: bool = field(init=False, default=True)
    """Set whenever the hosts, their addresses, or the drained names change."""
    drained: set[str] = field(init=False, factory=set)
    """The drained names, as they were given."""
    _added: list[HostAddress] = field(init=False, factory=list)
    _read_bytes: int = field(default=0, init=False)
    """Bytes of the file of changes that have been read."""
    _resolved: dict[HostAddress, list[HostAddress]] = field(init=False, factory=dict)
    """The addresses of each name that is being resolved; empty before the first result."""
    _resolving: trio.CapacityLimiter = field(init=False, factory=lambda: trio.CapacityLimiter(RESOLVING_AT_ONCE))

    def read(self) -> None:
        """Read the configured hosts. Blocks. Raises ``ValueError`` or ``OSError``."""
        self.all = dict.fromkeys([*read_hosts(self.setting), *self._added])
        self.has_changed = True

    def addresses(self, nursery: trio.Nursery) -> dict[HostAddress, list[HostAddress]]:
        """Return the addresses known now, each with its hosts; tasks in ``nursery`` resolve new names."""
        found: dict[HostAddress, list[HostAddress]] = {}
        for host in self.all:
            if not host.is_numeric and host not in self._resolved:
                self._resolved[host] = []
                nursery.start_soon(self._keep_resolving, host)
            for address in self._resolved.get(host, [host]):
                found.setdefault(address, []).append(host)
        return dict([*found.items()][:MAX_HOSTS])

    async def _keep_resolving(self, host: HostAddress) -> None:
        """Resolve a name repeatedly while it is one of the hosts; if that fails, it keeps its addresses."""
        failure = ""
        while host in self.all:
            try:
                async with self._resolving:
                    results = await trio.socket.getaddrinfo(host.host, host.port, type=trio.socket.SOCK_STREAM)
            # UnicodeError: the name cannot be encoded for the DNS. RuntimeError: no thread can be started.
            except (OSError, UnicodeError, RuntimeError) as error:
                if str(error) != failure:  # logged once, not at each attempt
                    failure = str(error)
                    logger.warning("the host %s cannot be resolved: %s", host, failure)
            else:
                failure = ""
                addresses = [HostAddress(str(resolved[0]), int(resolved[1])) for *_, resolved in results]
                self.has_changed |= {*addresses} != {*self._resolved[host]}
                self._resolved[host] = addresses
            await trio.sleep(RESOLVE_S)
        del self._resolved[host]

    def change(self, verb: Literal["add", "use", "drain"], *names: str) -> None:
        """Tell all processes of the server to add a host, or to use or drain names. Blocks briefly."""
        with self.path.open("a") as changes:
            changes.write(f"{' '.join([verb, *names])}\n")
        self.read_changes()

    def read_changes(self) -> None:
        """Read the changes by all processes of the server. Blocks briefly."""
        with suppress(FileNotFoundError), self.path.open("rb") as changes:
            # If the file is shorter than before, it is a new one.
            changes.seek(self._read_bytes if self._read_bytes <= self.path.stat().st_size else 0)
            for line in changes.read().decode().splitlines():
                verb, *names = line.split(" ")
                if verb == "drain":
                    self.drained.update(names)
                else:
                    self.drained.difference_update(names)
                if verb == "add":
                    self._added.extend(map(HostAddress.parse, names))
                    self.all[self._added[-1]] = None
                self.has_changed = True
            self._read_bytes = changes.tell()
