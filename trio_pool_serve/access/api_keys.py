"""The API keys of a server, and the usage of each."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Self

import trio
from attrs import define, field

from trio_pool_serve.access.key_file import ApiKey, digest_of, read_key_file
from trio_pool_serve.access.key_usage import KeyUsage
from trio_pool_serve.config import Config, NetworkConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.threads.offload import Offload

logger = logging.getLogger(__name__)

HEADERS = (b"authorization", b"x-api-key", b"api-key")
"""Where clients put keys; the last two are Anthropic's and Azure's. The first key that is right counts."""


@define(eq=False)
class ApiKeys:
    """Finds the key that a request presents.

    Keys are looked up by their SHA-256. How long that takes may depend on the digest that is looked for, which a client
    cannot steer towards another: so it tells nothing about other keys.

    The keys of ``--api-keys-file`` are known once ``start`` has returned.
    """

    network: NetworkConfig
    known_models: Collection[str] | None = ()
    """``None``: keys may be for any, as others may be loaded while the server runs."""
    processes: int = 1
    clock: Callable[[], float] = trio.current_time
    _of_flags: Mapping[bytes, ApiKey] = field(init=False)
    _by_digest: Mapping[bytes, ApiKey] = field(init=False)
    _usage: dict[tuple[str, bool], KeyUsage] = field(init=False, factory=dict)
    """By name, and whether it is that of batches. What a key has used stays when the file is read again."""

    def __attrs_post_init__(self) -> None:
        self._by_digest = self._of_flags = dict(_keys_of_flags(self.network.api_key_list))

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the keys of a server with these settings."""
        names = [name for source in config.sources for name in source.names]
        known = None if config.model_changes.model_api else names
        return cls(config.network, known, config.processes.api_workers)

    @property
    def are_needed(self) -> bool:
        """Whether requests need a key at all."""
        return bool(self._of_flags) or self.network.api_keys_file is not None

    def find(self, headers: Mapping[bytes, bytes]) -> ApiKey | None:
        """Return the key that a request presents; ``None`` if it presents none that is right."""
        for name in HEADERS:
            given = headers.get(name)
            if given is not None and (key := self._by_digest.get(digest_of(_without_scheme(name, given)))):
                return key
        return None

    def usage_of(self, key: ApiKey, *, by_batches: bool = False) -> KeyUsage:
        """Return what has been used of a key, by requests or by batches, which one process computes."""
        usage = self._usage.get((key.name, by_batches))
        if usage is None:
            usage = self._usage[key.name, by_batches] = KeyUsage(1 if by_batches else self.processes)
            usage.apply(key, self.clock())
        return usage

    def usage_by_batches(self, name: str) -> KeyUsage | None:
        """Return what the batches of a key have used; ``None`` if it has no limits a minute, or is no longer known."""
        for key in self._by_digest.values():
            if key.name == name and (key.requests_per_minute or key.tokens_per_minute):
                return self.usage_of(key, by_batches=True)
        return None

    def read_file(self) -> dict[bytes, ApiKey]:
        """Return the keys of the file by their digests, none without a file. Blocking.

        Raises ``ValueError`` or ``OSError`` for a file that cannot be used.
        """
        path = self.network.api_keys_file
        of_file = {} if path is None else read_key_file(path, self.known_models)
        if of_file.keys() & self._of_flags.keys():
            raise ValueError(f"--api-keys-file {path}: one of its keys is among those of --api-key.")
        return of_file

    async def start(self, offload: Offload) -> None:
        """Read the file, if there is one. Raises ``ModelLoadError``. Cancellation: as ``load``."""
        try:
            await self.load(offload)
        except (ValueError, OSError) as error:
            raise ModelLoadError(str(error)) from error

    async def load(self, offload: Offload) -> None:
        """Read the file, if there is one, in a thread.

        Raises what ``read_file`` raises; the keys stay as they were then. Cancellation: as soon as the thread has
        finished; nothing is changed.
        """
        if self.network.api_keys_file is None:
            return
        of_file = await offload.run("postprocess", self.read_file)
        await trio.lowlevel.checkpoint_if_cancelled()
        self._by_digest = {**of_file, **self._of_flags}
        now = self.clock()
        limits = {key.name: key for key in self._by_digest.values()}
        self._usage = {of: usage for of, usage in self._usage.items() if of[0] in limits}
        for (name, _), usage in self._usage.items():
            usage.apply(limits[name], now)

    async def reload(self, offload: Offload) -> None:
        """Read the file again; one that cannot be used is logged, and the keys stay as they were.

        Requests that are running end with the key that they began with. Cancellation: as ``load``.
        """
        if self.network.api_keys_file is None:
            return
        try:
            await self.load(offload)
        except (ValueError, OSError) as error:
            logger.error("the API keys stay as they were: %s", error)  # noqa: TRY400  (the message says it all)
        else:
            logger.info("the API keys have been read again: there are %d", len(self._by_digest))

    def __repr__(self) -> str:
        return f"<ApiKeys {len(self._by_digest)}>"


def _keys_of_flags(keys: Iterable[str]) -> Iterator[tuple[bytes, ApiKey]]:
    """Yield the keys of ``--api-key``, which are without limits; their names are none that a file can have."""
    for number, key in enumerate(keys, 1):
        yield digest_of(key), ApiKey(name=f"--api-key {number}", admin=True)


def _without_scheme(name: bytes, value: bytes) -> str:
    given = value.decode("latin1")
    scheme, _, key = given.partition(" ")
    # Some clients send the key without a scheme.
    return key.strip() if name == b"authorization" and scheme.lower() == "bearer" else given
