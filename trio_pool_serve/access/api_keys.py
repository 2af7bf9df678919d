"""The API keys of a server, and the usage of each against its limits."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import trio
from attrs import Factory, define, field

from trio_pool_serve.access.key_file import ApiKey, digest_of, read_key_file, warn_of_readers
from trio_pool_serve.config import Config
from trio_pool_serve.errors import ModelLoadError, OverloadedError, require
from trio_pool_serve.threads.offload import Offload

HEADERS = (b"authorization", b"x-api-key", b"api-key")
"""Headers for API keys; the last two are Anthropic's and Azure's. The first valid key counts."""


BUSY_RETRY_S = 1.0
"""``Retry-After`` for a key with too many running requests: it is not known when one of them ends."""

RECHECK_S = 10.0
"""Seconds that a job waits before it checks the limits again, which may have been reloaded."""


@define(eq=False)
class TokenBucket:
    """Starts full, at a minute's worth (at least 1), and refills at ``per_minute``; 0 is no limit. May be overdrawn.

    Times are in seconds.
    """

    per_minute: float = 0.0
    updated: float = 0.0
    used: float = field(default=0.0, init=False)

    def take(self, amount: float, now: float) -> None:
        """Take an amount, even if that overdraws the bucket."""
        if self.per_minute:
            self._fill(now)
            self.used += amount

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until ``amount`` is available; 0 if it is."""
        if not self.per_minute:
            return 0.0
        self._fill(now)
        return max(0.0, amount + self.used - max(1.0, self.per_minute)) * 60 / self.per_minute

    def resize(self, per_minute: float, now: float) -> None:
        """Change the rate; the used amount stays used, unless there was no limit or is none."""
        self._fill(now)
        self.used = self.used if per_minute else 0.0
        self.per_minute = per_minute

    def _fill(self, now: float) -> None:
        self.used = max(0.0, self.used - (now - self.updated) * self.per_minute / 60)
        self.updated = now


@define(eq=False)
class KeyUsage:
    """The running requests of one key, and its two buckets.

    Each of the ``processes`` API processes has an equal share of the rates and of the running requests, rounded up.
    Every process counts for itself, so a key gets less than its limits if its connections are spread unevenly. Tokens
    are taken when prompts are rendered and their number is known: a request may overdraw the bucket, and the next ones
    wait until it is filled again. A key's jobs have a usage of their own; their tokens are taken once a window is done.
    """

    processes: int = 1
    running: int = 0
    requests: TokenBucket = field(init=False, factory=TokenBucket)
    tokens: TokenBucket = field(init=False, factory=TokenBucket)
    max_running: int | None = None

    def apply(self, key: ApiKey, now: float) -> None:
        """Apply the limits of a key, which may have changed; used amounts stay used."""
        self.requests.resize((key.requests_per_minute or 0) / self.processes, now)
        self.tokens.resize((key.tokens_per_minute or 0) / self.processes, now)
        limit = key.max_concurrent_requests
        self.max_running = None if limit is None else -(-limit // self.processes)

    def enter(self, now: float) -> None:
        """Count a request that begins. Raises ``OverloadedError`` with the seconds until it would be accepted."""
        if self.max_running is not None and self.running >= self.max_running:
            raise _used_up(f"may have {self.max_running} requests at a time", BUSY_RETRY_S)
        for bucket, what in ((self.requests, "requests"), (self.tokens, "tokens")):
            if wait_s := bucket.wait_s(1, now):
                raise _used_up(f"has reached its limit of {what} per minute", wait_s)
        self.requests.take(1, now)
        self.running += 1

    def take_tokens(self, tokens: int) -> None:
        """Count tokens that will be computed."""
        self.tokens.take(tokens, trio.current_time())

    @asynccontextmanager
    async def saved_up(self, requests: int, tokens: int) -> AsyncIterator[None]:
        """Count requests, and wait until the limits allow them and ``tokens``, which the block may take.

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
        """Take from both buckets; return the seconds until neither is overdrawn."""
        now = trio.current_time()
        self.requests.take(requests, now)
        self.tokens.take(tokens, now)
        return max(self.requests.wait_s(0, now), self.tokens.wait_s(0, now))

    def leave(self) -> None:
        """Count a request that has ended."""
        self.running -= 1


def _used_up(what: str, retry_after_s: float) -> OverloadedError:
    return OverloadedError(f"This API key {what}.", retry_after_s=retry_after_s, reason="api_key")


@define(eq=False)
class ApiKeys:
    """Finds the key that a request presents.

    Keys are looked up by their SHA-256. The time of a lookup may depend on the digest, which a client cannot steer
    towards another key's: so it reveals nothing about other keys.

    The keys of ``--api-keys-file`` are known once ``load`` has returned.
    """

    config: Config
    _of_flags: Mapping[bytes, ApiKey] = field(
        init=False,
        default=Factory(
            lambda self: {
                digest_of(key): ApiKey(name=f"--api-key {number}", admin=True)
                for number, key in enumerate(self.config.network.api_key_list, 1)
            },
            takes_self=True,
        ),
    )
    """Without limits, and with names that no key of a file can have."""
    _by_digest: Mapping[bytes, ApiKey] = field(
        init=False, default=Factory(lambda self: self._of_flags, takes_self=True)
    )
    _usage: dict[tuple[str, bool], KeyUsage] = field(init=False, factory=dict)
    """Usage by the key's name, and whether it is the usage by jobs. It stays when the file is reloaded."""

    @property
    def are_needed(self) -> bool:
        """Whether requests need a key."""
        return bool(self._of_flags) or self.config.network.api_keys_file is not None

    def find(self, headers: Mapping[bytes, bytes]) -> ApiKey | None:
        """Return the key that a request presents; ``None`` if it presents no valid one."""
        for name in HEADERS:
            given = headers.get(name)
            if given is not None and (key := self._by_digest.get(digest_of(_without_scheme(name, given)))):
                return key
        return None

    def are_sent(self, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether a request presents any key, valid or not."""
        return any(_without_scheme(name, headers.get(name, b"")) for name in HEADERS)

    def usage_of(self, key: ApiKey, *, by_batches: bool = False) -> KeyUsage:
        """Return the usage of a key, by requests or by jobs of the Batch API, which one process computes."""
        usage = self._usage.get((key.name, by_batches))
        if usage is None:
            usage = self._usage[key.name, by_batches] = KeyUsage(1 if by_batches else self.config.processes.api_workers)
            usage.apply(key, trio.current_time())
        return usage

    def usage_by_batches(self, name: str) -> KeyUsage | None:
        """Return the usage of a key by jobs; ``None`` if it has no limits per minute, or is no longer known."""
        for key in self._by_digest.values():
            if key.name == name and (key.requests_per_minute or key.tokens_per_minute):
                return self.usage_of(key, by_batches=True)
        return None

    def read_file(self) -> dict[bytes, ApiKey]:
        """Return the keys of the file by digest, none without a file. Blocking.

        Raises ``ValueError`` or ``OSError`` for an invalid file.
        """
        path = self.config.network.api_keys_file
        # With ``--model-api``, keys may name models that are loaded while the server runs.
        known = [name for source in self.config.sources for name in (*source.names, *source.adapters)]
        of_file = {} if path is None else read_key_file(path, None if self.config.model_changes.model_api else known)
        require(
            of_file.keys().isdisjoint(self._of_flags),
            f"--api-keys-file {path}: one of its keys is also set by --api-key.",
            ValueError,
        )
        return of_file

    def check_file(self) -> dict[bytes, ApiKey]:
        """Return as ``read_file``, and log a warning if other users can read the file. Blocking."""
        if self.config.network.api_keys_file is not None:
            warn_of_readers(self.config.network.api_keys_file)
        return self.read_file()

    async def load(self, offload: Offload) -> None:
        """Read the file, if there is one, in a thread.

        Raises ``ModelLoadError``, without changing the keys. Cancellation: as soon as the thread has finished; nothing
        is changed.
        """
        if self.config.network.api_keys_file is None:
            return
        try:
            of_file = await offload.run("postprocess", self.read_file)
        except (ValueError, OSError) as error:
            raise ModelLoadError(str(error)) from error
        await trio.lowlevel.checkpoint_if_cancelled()
        self._use(of_file)

    async def reload(self, offload: Offload) -> None:
        """Reload the file. If it is invalid, that is logged and the keys stay as they were.

        Running requests keep the key with which they began. Cancellation: at once; nothing is changed.
        """
        path = self.config.network.api_keys_file
        of_file = None if path is None else await offload.reload("API keys", self.check_file, path)
        if of_file is not None:
            self._use(of_file)

    def _use(self, of_file: Mapping[bytes, ApiKey]) -> None:
        """Accept the keys of a file from now on, with their limits."""
        self._by_digest = {**of_file, **self._of_flags}
        now = trio.current_time()
        limits = {key.name: key for key in self._by_digest.values()}
        self._usage = {of: usage for of, usage in self._usage.items() if of[0] in limits}
        for (name, _), usage in self._usage.items():
            usage.apply(limits[name], now)

    def __repr__(self) -> str:
        return f"<ApiKeys {len(self._by_digest)}>"


def _without_scheme(name: bytes, value: bytes) -> str:
    given = value.decode("latin1")
    scheme, _, key = given.partition(" ")
    # Some clients send the key without a scheme.
    return key.strip() if name == b"authorization" and scheme.lower() == "bearer" else given
