"""One budget in bytes for the memory of requests in this process: bodies, prepared inputs, vectors, unsent responses.

The cache of prepared images uses the rest of it.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Any

import trio
from attrs import define, field

from trio_pool_serve.errors import OverloadedError
from trio_pool_serve.threads.client_turns import ClientCounts, ClientTurns
from trio_pool_serve.threads.lru_cache import LruCache
from trio_pool_serve.types import Client, RenderedPrompt

DEFAULT_BYTES = 2 * 2**30
"""The largest image of a Qwen-VL model takes 300 MB, one of CLIP 600 KB; a body may have 16 MB by default."""

CLIENT_SHARE = 0.5
"""Part of the budget for the requests of one client: half stays for others, whatever one sends."""

MAX_CONCURRENT_PREPARATIONS = 4
"""An image's size is unknown until it is prepared: at most this many can exceed the budget. A client leaves one to
others, because its token embeddings wait until a thread has done all its other work."""

RETRY_AFTER_S = 1.0

SHORTAGE_EVERY_S = 1.0
"""Minimum seconds between two calls of ``on_shortage``, which may look at thousands of bodies."""


def in_units(nbytes: int) -> str:
    """Return a size in the largest unit of which it is a multiple: ``16 MiB``."""
    power = next(power for power in (3, 2, 1, 0) if nbytes % 1024**power == 0)
    return f"{nbytes // 1024**power} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"


@define(eq=False)
class Reservation:
    """Bytes that one request holds, until ``release``."""

    budget: "MemoryBudget"
    client: Client
    is_of_images: bool = False
    """Whether the bytes are of encoded images, which are released once these are prepared."""
    nbytes: int = field(default=0, init=False)
    is_released: bool = field(default=False, init=False)

    def grow(self, nbytes: int) -> None:
        """Hold more. Raises ``OverloadedError`` if that does not fit into the budget, or the client's share of it.

        Not after ``release``.
        """
        assert not self.is_released  # noqa: S101  (nothing would release it again)
        self.budget.require_room(self.client, nbytes, besides=self.nbytes)
        self.settle(self.nbytes + nbytes)

    def settle(self, nbytes: int) -> None:
        """Hold exactly ``nbytes`` from now on, even if they do not fit: for memory that is in use already."""
        more, self.nbytes = nbytes - self.nbytes, nbytes
        if self.is_of_images:
            self.budget.fetched.add(self.client.number, more)
        self.budget.add(self.client, more)

    def release(self) -> None:
        """Hold nothing any longer, for good."""
        self.is_released = True
        self.settle(0)


@define(eq=False)
class MemoryBudget:
    """Counts the bytes that requests hold, of all and of each client.

    Bodies that do not fit are refused: see ``Reservation``. Images and token embeddings are not prepared before there
    is room: kilobytes of a request would become gigabytes as fast as they are prepared, and wait until they are
    computed. No client has more than ``CLIENT_SHARE`` of the budget, and each may have ``client_bytes`` with one
    request, whatever others hold.

    All background work of a client counts as one request: only the bytes of others are a reason to refuse some of it.
    Its own bytes are bounded by its windows, and images wait (``wait_to_fetch``).
    """

    max_bytes: int = DEFAULT_BYTES
    client_bytes: int = 0
    held_bytes: int = field(init=False, default=0)
    cache: LruCache[Any, Any] | None = field(init=False, default=None)
    """The cache of images, which takes bytes that requests do not hold."""
    on_shortage: set[Callable[[float], None]] = field(init=False, factory=set)
    """Called with ``time.monotonic()`` before a request is refused, at most once a second, to release memory."""
    _next_shortage: float = field(init=False, default=0.0)
    _by_client: ClientCounts = field(init=False, factory=ClientCounts)
    _prepared: ClientCounts = field(init=False, factory=ClientCounts)
    """Bytes in ``holding``: released once computed, so it makes sense to wait for them."""
    fetched: ClientCounts = field(init=False, factory=ClientCounts)
    """Bytes of encoded images that were fetched, or for whose fetching memory is reserved."""
    _in_background: ClientCounts = field(init=False, factory=ClientCounts)
    """The part of ``_by_client`` that background work holds."""
    _released: trio.lowlevel.ParkingLot = field(init=False, factory=trio.lowlevel.ParkingLot)
    _preparing: ClientTurns = field(
        init=False, factory=lambda: ClientTurns(MAX_CONCURRENT_PREPARATIONS, MAX_CONCURRENT_PREPARATIONS - 1)
    )

    @property
    def share_bytes(self) -> int:
        """The part of the budget that one client may have."""
        return int(self.max_bytes * CLIENT_SHARE)

    def require_room(self, client: Client, nbytes: int, *, besides: int = 0) -> None:
        """Raise ``OverloadedError`` unless a client's request, which holds ``besides`` bytes, may hold ``nbytes`` more.

        A request has room whatever its size when no other holds anything.
        """
        message = self._lacks_room(client, nbytes, besides)
        now = time.monotonic()
        if message and now >= self._next_shortage:
            self._next_shortage = now + SHORTAGE_EVERY_S
            for make_room in tuple(self.on_shortage):
                make_room(now)
            message = self._lacks_room(client, nbytes, besides)
        if message:
            raise OverloadedError(message, retry_after_s=RETRY_AFTER_S, reason="memory")

    def _lacks_room(self, client: Client, nbytes: int, besides: int) -> str:
        """Return the message why a request may not hold more; empty if it may."""
        held = self._by_client[client.number]
        if client.is_background:
            besides = self._in_background[client.number]
        if held <= besides and besides + nbytes <= self.client_bytes and not client.is_background:
            return ""
        if self.held_bytes > besides and self.held_bytes + nbytes > self.max_bytes:
            return "Requests hold all of the server's memory for them."
        if held > besides and held + nbytes > self.share_bytes:
            return "This client's requests hold all of the memory that one client may have."
        return ""

    def add(self, client: Client, nbytes: int) -> None:
        """Count bytes that a client's request holds, or no longer holds if negative; images are evicted for them."""
        if not nbytes:
            return
        self.held_bytes += nbytes
        self._by_client.add(client.number, nbytes)
        if client.is_background:
            self._in_background.add(client.number, nbytes)
        if nbytes > 0:
            if self.cache is not None and self.held_bytes + self.cache.bytes > self.max_bytes:
                self.cache.evict(self.free_bytes)
        else:
            self._released.unpark_all()

    @property
    def free_bytes(self) -> int:
        """The part of the budget that requests do not hold."""
        return max(0, self.max_bytes - self.held_bytes)

    @asynccontextmanager
    async def preparing(self, client: int = 0) -> AsyncIterator[None]:
        """Prepare an input inside the block, entered below the limit in a client's turn. Cancellation: at once."""
        async with self._preparing.turn(client):
            await self.wait_until_below_limit()
            yield

    async def wait_until_below_limit(self) -> None:
        """Wait while requests hold all of the budget, and some of it is about to be computed. Cancellation: at once."""
        while self.held_bytes >= self.max_bytes and self._prepared.total():
            await self._released.park()

    async def wait_for_share(self, client: Client) -> None:
        """Wait as ``wait_until_below_limit``, but for the client's share of the budget. Cancellation: at once."""
        while self._by_client[client.number] >= self.share_bytes and self._prepared[client.number]:
            await self._released.park()

    async def wait_to_fetch(self, room: Reservation, nbytes: int) -> None:
        """Hold ``nbytes`` for images of background work that will be fetched, or half of the client's share if less.

        It waits while images that the client has fetched or prepared leave no room for them. Raises ``OverloadedError``
        if others hold the memory. Cancellation: at once.
        """
        client, nbytes = room.client.number, min(nbytes, self.share_bytes // 2)
        while self._by_client[client] + nbytes > self.share_bytes and (self.fetched[client] or self._prepared[client]):
            await self._released.park()
        room.grow(nbytes)

    def holding(self, prompts: Sequence[RenderedPrompt], client: Client) -> AbstractContextManager[None]:
        """Count the arrays of prompts as held for the duration of the block, in which they are computed."""
        size = sum([held.nbytes for each in prompts for held in (each.images, each.embeds) if held is not None])
        return self._holding(size, client) if size else nullcontext()  # of texts

    @contextmanager
    def _holding(self, size: int, client: Client) -> Iterator[None]:
        self._prepared.add(client.number, size)
        self.add(client, size)
        try:
            yield
        finally:
            self._prepared.add(client.number, -size)
            self.add(client, -size)

    def __repr__(self) -> str:
        return f"<MemoryBudget {self.held_bytes}/{self.max_bytes}>"
