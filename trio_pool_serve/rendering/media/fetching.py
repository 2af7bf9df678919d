"""Fetches images over HTTP."""

import ssl
from collections.abc import Collection, Sequence
from ipaddress import IPv4Network, IPv6Network
from typing import TYPE_CHECKING

import h11
import trio
from attrs import define, field

from trio_pool_serve.errors import InvalidRequestError, MediaError, require, require_request
from trio_pool_serve.processes.large_imports import LazyModule
from trio_pool_serve.rendering.media.addresses import Resolver, is_public, is_within
from trio_pool_serve.rendering.media.encoded_image import too_large
from trio_pool_serve.rendering.memory_budget import Reservation, in_units
from trio_pool_serve.threads.client_turns import ClientTurns
from trio_pool_serve.threads.offload import Offload

if TYPE_CHECKING:
    import httpx
else:
    httpx = LazyModule("httpx")  # 60 ms, most of them for its command line

TIMEOUT_S = 10.0
"""Time limit for fetching one image, redirects included. Other images wait for its turn."""

MAX_CONCURRENT_FETCHES = 32
MAX_FETCHES_PER_CLIENT = 16
"""Slow servers take up to ``TIMEOUT_S``: one client's leave fetches to other clients."""

MAX_REDIRECTS = 5
MAX_LOCATION = 8192
"""Characters of a redirect's Location."""

MAX_ADDRESSES = 32
"""Maximum addresses of one host, all of which are checked. A domain's owner can list thousands."""

MAX_TRIED_ADDRESSES = 4
"""Maximum addresses of one host that are connected to; the timeout is divided between them."""

REDIRECTS = frozenset({301, 302, 303, 307, 308})

HEADERS = {
    "Accept": "image/png, image/jpeg, image/webp, image/gif, image/bmp",
    # Compression does not make encoded images smaller, so encoded bodies are rejected and need no inflation limit.
    "Accept-Encoding": "identity",
    "User-Agent": "trio-pool-serve",
    # A reused connection would serve another name at the same address without checking its certificate.
    "Connection": "close",
}

MAX_HEAD_BYTES = 32 * 1024
"""Maximum size of one head, of the trailers of a body, or of a chunk header. Sites send a few KiB."""

MAX_HEAD_LINES = 128
"""Maximum lines of a head, or of trailers. They are parsed in one call, whose duration this bounds."""

MAX_FRAMING_BYTES = 64 * 1024
PAYLOAD_PER_FRAMING = 32
"""Bytes other than the body: interim responses, the head, and chunk headers. One more is allowed for each 32 bytes of
the body. Each chunk costs the event loop a fixed time, however small it is; servers send chunks of kilobytes."""

HEAD_READ_BYTES = 2 * 1024
BODY_READ_BYTES = 8 * 1024
"""Bytes read per call, which bounds how much is parsed before other tasks run."""


async def open_stream(address: str, port: int, host: str, ssl_context: ssl.SSLContext | None) -> trio.abc.Stream:
    """Connect to an address; with ``ssl_context`` by TLS, verifying ``host``'s certificate.

    Raises ``OSError`` or ``trio.BrokenResourceError`` if connecting or the handshake fails; ``ValueError`` for a host
    name that no certificate can have. Cancellation: at once; the connection is closed.
    """
    stream = await trio.open_tcp_stream(address, port)
    if ssl_context is None:
        return stream
    try:
        secured = trio.SSLStream(stream, ssl_context, server_hostname=host, https_compatible=True)
        await secured.do_handshake()
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return secured


@define(eq=False)
class ImageDownload:
    """One GET of an untrusted server, over a ``stream`` that is used for nothing else, and its response.

    Other tasks run after each interim response, the head and each chunk, however many arrive together; their number is
    bounded by the bytes that they take.
    """

    stream: trio.abc.Stream
    _protocol: h11.Connection = field(
        init=False, factory=lambda: h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
    )
    _received: int = field(init=False, default=0)
    _payload: int = field(init=False, default=0)

    async def send_get(self, target: bytes, headers: Sequence[tuple[str, str]]) -> h11.Response:
        """Send a GET and return the head of the response.

        Raises ``trio.BrokenResourceError`` if the connection breaks, ``h11.ProtocolError`` for anything that is no
        response or has too many bytes besides the body. Cancellation: at once.
        """
        request = self._protocol.send(h11.Request(method=b"GET", target=target, headers=list(headers)))
        await self.stream.send_all((request or b"") + (self._protocol.send(h11.EndOfMessage()) or b""))
        while True:
            event = await self._next_event(HEAD_READ_BYTES)
            if isinstance(event, h11.Response):
                return event

    async def read(self) -> bytes:
        """Return the next bytes of the body, empty at its end. Errors and cancellation: as ``send_get``."""
        event = await self._next_event(BODY_READ_BYTES)
        return bytes(event.data) if isinstance(event, h11.Data) else b""

    async def _next_event(self, read_bytes: int) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        while True:
            event = self._protocol.next_event()
            await trio.lowlevel.checkpoint()
            if isinstance(event, h11.Data):
                self._payload += len(event.data)
            if event is not h11.NEED_DATA:
                return event
            self._check()
            received = await self.stream.receive_some(read_bytes)
            self._received += len(received)
            self._protocol.receive_data(bytes(received))

    def _check(self) -> None:
        """Raise ``h11.RemoteProtocolError`` if the bytes other than the body exceed their limits."""
        if self._received - self._payload > MAX_FRAMING_BYTES + self._payload // PAYLOAD_PER_FRAMING:
            raise h11.RemoteProtocolError("too many bytes other than the body")
        incomplete, _ = self._protocol.trailing_data
        if incomplete.count(b"\n") > MAX_HEAD_LINES:
            raise h11.RemoteProtocolError("too many lines")


@define(eq=False)
class ImageFetcher:
    """Fetches images over HTTP from addresses of the public internet, and addresses in ``networks``.

    A host name is resolved once per request, all its addresses are checked, and one of them is connected to, so a name
    server cannot give a different answer after the check. Any port is allowed. No cookies, proxies or credentials are
    sent, and no connection is reused.

    A public address may be reachable only from this server: a firewall admits it, or a router leads back to this
    machine or its neighbours. This cannot be detected here. In such networks operators must set ``domains``, or block
    in the network the addresses that the server must not reach.

    ``domains``, if not empty, are the only hosts that images are fetched from, in lower case, besides addresses in
    ``networks``; ``*.example.org`` stands for all subdomains of ``example.org``, and ``*`` for all hosts. All limits
    apply to redirects as well.
    """

    offload: Offload
    max_bytes: int
    timeout_s: float = TIMEOUT_S
    domains: Collection[str] = ()
    networks: Collection[IPv4Network | IPv6Network] = ()
    resolver: Resolver = field(factory=Resolver)
    turns: ClientTurns = field(init=False, factory=lambda: ClientTurns(MAX_CONCURRENT_FETCHES, MAX_FETCHES_PER_CLIENT))
    _ssl_context: ssl.SSLContext | None = field(init=False, default=None)

    async def fetch(self, url: str, held: Reservation) -> list[bytes]:
        """Return the body of an ``http:`` or ``https:`` URL, in chunks, which are ``held`` as they arrive.

        Raises ``InvalidRequestError`` for a URL that is malformed or not allowed, ``MediaError`` if the response is not
        200, too large or too slow, or an address is not allowed: the message is the same as for a host that does not
        exist. It is raised too if more would be ``held`` than one client may have; ``OverloadedError`` if memory lacks.
        Cancellation: at once; the connection is closed.
        """
        checked = self._checked(url)
        async with self.turns.turn(held.client.number):
            with trio.move_on_after(self.timeout_s):
                return await self._follow(checked, held)
        raise MediaError(f"The image did not arrive within {self.timeout_s:g} s.")

    async def _follow(self, url: "httpx.URL", held: Reservation) -> list[bytes]:
        for _ in range(MAX_REDIRECTS + 1):
            found = await self._get(url, held)
            if not isinstance(found, httpx.URL):
                return found
            url = found
        raise MediaError(f"The URL of the image redirects more than {MAX_REDIRECTS} times.")

    def _checked(self, url: str) -> "httpx.URL":
        try:
            parsed = httpx.URL(url)
            host = _host(parsed)
        except (httpx.InvalidURL, UnicodeError, ValueError) as error:
            raise InvalidRequestError("The URL of the image is malformed.") from error
        require_request(
            parsed.scheme in ("http", "https") and host != "",
            "The URL of the image must begin with http: or https: and have a host.",
        )
        require_request(not parsed.userinfo, "The URL of the image must not contain credentials.")
        entries = {"*", host, *(f"*{host[at:]}" for at, letter in enumerate(host) if letter == ".")}
        require_request(
            not self.domains or not entries.isdisjoint(self.domains) or is_within(host, self.networks),
            f"This server fetches no images from {host} (--allowed-media-domains).",
        )
        return parsed

    async def _get(self, url: "httpx.URL", held: Reservation) -> "list[bytes] | httpx.URL":
        """Return the body of a URL, or the URL that it redirects to."""
        host = _host(url)
        port = url.port or (443 if url.scheme == "https" else 80)
        addresses = await self.resolver.resolve(host, port, held.client.number)
        allowed = (is_within(address, self.networks) or is_public(address) for address in addresses)
        require(
            0 < len(addresses) <= MAX_ADDRESSES and all(allowed),
            "The host of the image has no address that the server may fetch images from.",
            MediaError,
        )
        addresses = addresses[:MAX_TRIED_ADDRESSES]
        ssl_context = await self._load_ssl_context() if url.scheme == "https" else None
        for address in addresses:
            try:
                with trio.fail_after(self.timeout_s / len(addresses)):
                    stream = await open_stream(address, port, host, ssl_context)
            except (OSError, ValueError, trio.BrokenResourceError, trio.TooSlowError):
                continue
            async with stream:
                download = ImageDownload(stream)
                headers = [("Host", url.netloc.decode("ascii")), *HEADERS.items()]
                try:
                    response = await download.send_get(url.raw_path, headers)
                    return self._redirect(url, response) or await self._read(response, download, held)
                except (h11.ProtocolError, trio.BrokenResourceError) as error:
                    raise MediaError("The connection to the server of the image broke.") from error
        raise MediaError("The server of the image cannot be reached.")

    async def _load_ssl_context(self) -> ssl.SSLContext:
        """Return the context with the certificate authorities of SSL_CERT_FILE, else certifi's."""
        if self._ssl_context is None:
            self._ssl_context = await self.offload.run("media", _load_authorities, abandon_on_cancel=True)
        return self._ssl_context

    def _redirect(self, url: "httpx.URL", response: h11.Response) -> "httpx.URL | None":
        location = httpx.Headers(list(response.headers)).get("Location")
        if response.status_code not in REDIRECTS or location is None:
            return None
        try:
            require_request(len(location) <= MAX_LOCATION, "The URL is too long.")
            return self._checked(str(url.join(location)))
        except (httpx.InvalidURL, UnicodeError, ValueError, InvalidRequestError) as error:
            raise MediaError("The URL of the image redirects to one that is not followed.") from error

    async def _read(self, response: h11.Response, download: ImageDownload, held: Reservation) -> list[bytes]:
        require(
            response.status_code == 200, f"The server of the image responded with {response.status_code}.", MediaError
        )
        headers = httpx.Headers(list(response.headers))
        require(
            headers.get("Content-Encoding", "identity").strip().lower() == "identity",
            "The server of the image sent it compressed, which was not requested.",
            MediaError,
        )
        length = headers.get("Content-Length", "")
        if length.isdecimal() and int(length) > self.max_bytes:
            raise too_large(self.max_bytes)
        chunks: list[bytes] = []
        received = 0
        while chunk := await download.read():
            received += len(chunk)
            if received > self.max_bytes:
                raise too_large(self.max_bytes)
            if held.nbytes + len(chunk) > held.budget.share_bytes:  # while all is held nothing is prepared
                raise MediaError(
                    f"The images of the input are together larger than {in_units(held.budget.share_bytes)}."
                )
            held.grow(len(chunk))
            chunks.append(chunk)
        return chunks

    def __repr__(self) -> str:
        return f"<ImageFetcher {self.turns.statistics()}>"


def _load_authorities() -> ssl.SSLContext:
    context = httpx.create_ssl_context(trust_env=True)  # reads and parses a file
    context.set_alpn_protocols(["http/1.1"])
    return context


def _host(url: "httpx.URL") -> str:
    """Return a URL's host as in DNS, or its address."""
    return url.raw_host.decode("ascii").removesuffix(".").lower()
