"""The state of an engine on another machine, as this process sees it at the other end of a link."""

from typing import Any, Literal

import trio
from attrs import define, field

from trio_pool_serve.engine.remote.connectors import HostAddress
from trio_pool_serve.engine.remote.remote_device import RemoteDevice


@define(eq=False)
class HostPlace:
    """The place of one engine, while its address belongs to a host."""

    hosts: list[HostAddress]
    """The hosts with this address, as they were given; a name may have several addresses."""
    address: HostAddress
    link: RemoteDevice = field(init=False)
    is_wanted: bool = field(default=True, init=False)
    """Whether its address still belongs to a host."""
    loaded: str | None = field(default=None, init=False)
    """The name of the model that its engine has loaded."""
    scope: trio.CancelScope = field(init=False, factory=trio.CancelScope)

    @property
    def state(self) -> Literal["connecting", "draining", "stalled", "ready"]:
        """The state of the link. A host is never failed: this server does not restart its engine."""
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
            "model": None if link.hello is None else self.loaded,
            "dtype": None if link.hello is None else link.hello.dtype,
            "backend": None if link.hello is None else link.hello.backend,
            "zone": None if link.hello is None else link.zone,
            "waiting_rows": link.waiting_rows,
            "waiting_tokens": link.waiting_tokens,
            "tokens_per_s": round(link.passes.tokens_per_s, 1),
            "losses": link.losses,
        }
