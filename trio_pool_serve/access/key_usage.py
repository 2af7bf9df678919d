"""What the requests with one API key have used, against its limits."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from attrs import define, field

from trio_pool_serve.access.key_file import ApiKey
from trio_pool_serve.errors import OverloadedError

BUSY_RETRY_S = 1.0
"""``Retry-After`` for a key with too many running requests: when one of them ends is not known."""

RECHECK_S = 10.0
"""For which a batch waits before it looks at the limits again, which may have been reloaded."""


@define(eq=False)
class TokenBucket:
    """Fills at ``per_minute`` up to a minute's worth, at least 1, which it has at first. Times are in seconds.

    It may be overdrawn.
    """

    per_minute: float
    updated: float
    level: float = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.level = self.capacity

    @property
    def capacity(self) -> float:
        """The most that it holds."""
        return max(1.0, self.per_minute)

    def take(self, amount: float, now: float) -> None:
        """Take an amount, whether it is there or not."""
        self._fill(now)
        self.level -= amount

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until there is that much; 0 if there is."""
        self._fill(now)
        return max(0.0, amount - self.level) * 60 / self.per_minute

    def resize(self, per_minute: float, now: float) -> None:
        """Change the rate; what has been used stays used."""
        self._fill(now)
        used = self.capacity - self.level
        self.per_minute = per_minute
        self.level = self.capacity - used

    def _fill(self, now: float) -> None:
        self.level = min(self.capacity, self.level + (now - self.updated) * self.per_minute / 60)
        self.updated = now


@define(eq=False)
class KeyUsage:
    """The running requests of one key, and its two buckets.

    ``processes`` API processes have an equal share of the rates each, and of the running requests, rounded up: every
    process counts for itself, so a key gets less than its limits if its connections are spread unevenly. Tokens are
    taken as prompts are rendered, which is when their number is known: a request may overdraw the bucket, and the next
    ones wait until that is filled up again. A key's batches have another one of these.
    """

    processes: int = 1
    running: int = 0
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    max_running: int | None = None

    def apply(self, key: ApiKey, now: float) -> None:
        """Take the limits of a key, which may differ from those before; what was used stays."""
        self.requests = self._bucket(self.requests, key.requests_per_minute, now)
        self.tokens = self._bucket(self.tokens, key.tokens_per_minute, now)
        limit = key.max_concurrent_requests
        self.max_running = None if limit is None else -(-limit // self.processes)

    def enter(self, now: float) -> None:
        """Count a request that begins. Raises ``OverloadedError`` with the seconds until it would be accepted."""
        if self.max_running is not None and self.running >= self.max_running:
            raise _used_up(f"may have {self.max_running} requests at a time", BUSY_RETRY_S)
        for bucket, what in ((self.requests, "requests"), (self.tokens, "tokens")):
            if bucket is not None and (wait_s := bucket.wait_s(1, now)):
                raise _used_up(f"has used its {what} per minute", wait_s)
        if self.requests is not None:
            self.requests.take(1, now)
        self.running += 1

    def take_tokens(self, tokens: int) -> None:
        """Count tokens that will be computed."""
        if self.tokens is not None:
            self.tokens.take(tokens, trio.current_time())

    @asynccontextmanager
    async def saved_up(self, requests: int, tokens: int) -> AsyncIterator[None]:
        """Count requests, and wait until the limits have allowed them and so many tokens, which the block may take.

        Cancellation: at once; the requests count.
        """
        wait_s = self._take(requests, tokens)
        try:
            while wait_s:
                await trio.sleep(min(wait_s, RECHECK_S))
                wait_s = self._take(0, 0)
            yield
        finally:
            self._take(0, -tokens)

    def _take(self, requests: int, tokens: int) -> float:
        """Take from both buckets; return the seconds until none is overdrawn."""
        wait_s = [0.0]
        for bucket, amount in ((self.requests, requests), (self.tokens, tokens)):
            if bucket is not None:
                bucket.take(amount, trio.current_time())
                wait_s.append(bucket.wait_s(0, trio.current_time()))
        return max(wait_s)

    def leave(self) -> None:
        """Count a request that has ended."""
        self.running -= 1

    def _bucket(self, bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
        if per_minute is None:
            return None
        share = per_minute / self.processes
        if bucket is None:
            return TokenBucket(share, now)
        bucket.resize(share, now)
        return bucket


def _used_up(what: str, retry_after_s: float) -> OverloadedError:
    return OverloadedError(f"The API key {what}.", retry_after_s=retry_after_s, reason="api_key")
