"""Images from servers that misbehave, over real sockets."""

import gzip
import socket
import ssl
from ipaddress import ip_network

import pytest
import trio
import trustme

from tests.conftest import until
from tests.rendering.media.image_server import Answer, ImageServer, drips, never, redirects, says, serving
from tests.rendering.media.images import encoded
from trio_pool_serve.errors import InvalidRequestError, MediaError, OverloadedError
from trio_pool_serve.rendering.media import fetching as fetching_module
from trio_pool_serve.rendering.media.addresses import Resolver
from trio_pool_serve.rendering.media.fetching import (
    MAX_ADDRESSES,
    MAX_CONCURRENT_FETCHES,
    MAX_FETCHES_PER_CLIENT,
    MAX_REDIRECTS,
    ImageFetcher,
)
from trio_pool_serve.rendering.memory_budget import MemoryBudget, Reservation
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Client

IMAGE = encoded()
LIMIT = 10_000
FOREVER = 60.0
ANY_ADDRESS = (ip_network("0.0.0.0/0"), ip_network("::/0"))
BROKE = "The connection to the server of the image broke."
NO_ADDRESS = "The host of the image has no address that the server may fetch images from."


def fetcher(**options) -> ImageFetcher:
    options = {"timeout_s": FOREVER, "max_bytes": LIMIT, "networks": ANY_ADDRESS, **options}
    return ImageFetcher(Offload(), **options)


def held(client: str = "") -> Reservation:
    return Reservation(MemoryBudget(), Client(client))


async def fetched(fetching: ImageFetcher, url: str) -> bytes:
    return b"".join(await fetching.fetch(url, held()))


async def asked(server: ImageServer, times: int) -> None:
    """Return once a server has been asked so often."""
    await until(lambda: len(server.heads) >= times)


async def refused(fetching: ImageFetcher, url: str, kind: type[Exception] = MediaError) -> str:
    with pytest.raises(kind) as caught:
        await fetching.fetch(url, held())
    assert fetching.turns.statistics().borrowed == 0
    return str(caught.value)


class Names:
    """A name server that knows other hosts than the real one; each is asked for as often as it is listed."""

    def __init__(self, **addresses: list[list[str]]):
        self.addresses = {name.replace("_", "."): answers for name, answers in addresses.items()}
        self.asked: list[str] = []

    def __call__(self, host: str, port: int, *, type: int):  # noqa: A002
        self.asked.append(host)
        answers = self.addresses[host]
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in found]
        return [(kind, type, 0, "", (address, port)) for kind, address in zip(families, found, strict=True)]


@pytest.fixture
async def server():
    async with serving({"/image": says(IMAGE)}) as serving_images:
        yield serving_images


# -- what is fetched --------------------------------------------------------------------------------------


async def test_servers_learn_nothing_but_what_is_asked(server: ImageServer):
    server.answers["/image"] = says(IMAGE, "Set-Cookie: a=b")
    fetching = fetcher()
    for _ in range(2):
        assert await fetched(fetching, server.url("/image") + "#part") == IMAGE
    names = {line.partition(":")[0].lower() for line in server.heads[-1].splitlines()[1:] if line}
    assert names == {"host", "accept", "accept-encoding", "user-agent", "connection"}
    assert server.header("host") == f"127.0.0.1:{server.port}"
    assert server.header("accept-encoding") == "identity"


async def test_a_body_may_come_in_chunks_or_until_the_connection_ends():
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (IMAGE[:7], IMAGE[7:], b""))
    in_chunks = says(chunks, "Transfer-Encoding: chunked", with_length=False)
    async with serving({"/chunks": in_chunks, "/end": raw(HEAD + b"\r\n" + IMAGE)}) as server:
        for path in server.answers:
            assert await fetched(fetcher(), server.url(path)) == IMAGE


async def test_redirects_are_followed_up_to_a_limit():
    answers = {f"/{n}": redirects(f"/{n - 1}", status) for n, status in enumerate([*REDIRECTS, *REDIRECTS], 1)}
    async with serving({**answers, "/0": says(IMAGE), "/self": redirects("/self")}) as server:
        assert await fetched(fetcher(), server.url(f"/{MAX_REDIRECTS}")) == IMAGE
        assert "redirects more than 5 times" in await refused(fetcher(), server.url(f"/{MAX_REDIRECTS + 1}"))
        before = len(server.heads)
        assert "redirects" in await refused(fetcher(), server.url("/self"))
        assert len(server.heads) == before + MAX_REDIRECTS + 1


REDIRECTS = ["301 Moved", "302 Found", "303 See Other", "307 Temporary Redirect", "308 Permanent Redirect"]


# -- limits -----------------------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\n"

SLOW = {
    "nothing": never,
    "a body in drops": drips(HEAD + b"Content-Length: 9999\r\n\r\n", b"a"),
    "a head in drops": drips(HEAD, b"A: b\r\n"),
    "one interim answer after another": drips(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
}


@pytest.mark.parametrize("answer", SLOW.values(), ids=SLOW)
async def test_a_slow_server_is_left_at_the_time_limit(answer):
    async with serving({"/": answer}) as server:
        told = await refused(fetcher(timeout_s=0.3, max_bytes=10**9), server.url("/"))
        assert told in ("The image did not arrive within 0.3 s.", BROKE)


async def test_the_time_limit_is_for_all_redirects_together():
    async def slowly(stream):
        await trio.sleep(0.2)
        await redirects("/")(stream)

    async with serving({"/": slowly}) as server:
        assert "within 0.5 s" in await refused(fetcher(timeout_s=0.5), server.url("/"))
        assert len(server.heads) <= 3


async def test_a_body_is_read_up_to_the_limit_and_not_at_all_if_it_says_that_it_is_larger():
    answers = {
        "/says": says(b"", f"Content-Length: {LIMIT + 1}", with_length=False),
        "/end": drips(HEAD + b"\r\n", bytes(1000)),
        "/chunks": drips(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"3e8\r\n" + bytes(1000) + b"\r\n"),
    }
    async with serving({**answers, "/exactly": says(bytes(LIMIT))}) as server:
        for path in answers:
            assert f"larger than {LIMIT} bytes" in await refused(fetcher(), server.url(path))
        assert len(await fetched(fetcher(), server.url("/exactly"))) == LIMIT


async def test_no_more_images_are_fetched_at_once_than_allowed():
    fetching = fetcher()
    async with serving({"/": never}) as server, trio.open_nursery() as nursery:
        for number in range(MAX_CONCURRENT_FETCHES + 3):
            nursery.start_soon(fetching.fetch, server.url("/"), held(str(number % 2)))
        await asked(server, MAX_CONCURRENT_FETCHES)
        stats = fetching.turns.statistics()
        assert (stats.borrowed, stats.waiting) == (MAX_CONCURRENT_FETCHES, 3)
        assert repr(fetching) == "<ImageFetcher 32/32+3>"
        nursery.cancel_scope.cancel()
    assert fetching.turns.statistics().borrowed == fetching.turns.statistics().waiting == 0


async def test_slow_hosts_of_one_client_leave_fetches_to_others():
    fetching = fetcher()
    async with serving({"/": never, "/image": says(IMAGE)}) as server, trio.open_nursery() as nursery:
        for _ in range(3 * MAX_CONCURRENT_FETCHES):
            nursery.start_soon(fetching.fetch, server.url("/"), held("slow"))
        await asked(server, MAX_FETCHES_PER_CLIENT)
        with trio.fail_after(10):
            async with trio.open_nursery() as others:
                for number in range(100):
                    others.start_soon(fetching.fetch, server.url("/image"), held(str(number % 3)))
        assert server.heads.count(server.heads[0]) == MAX_FETCHES_PER_CLIENT
        assert fetching.turns.statistics().borrowed == MAX_FETCHES_PER_CLIENT
        nursery.cancel_scope.cancel()


async def test_bytes_are_held_as_they_arrive_and_refused_where_there_is_no_room():
    budget = MemoryBudget(max_bytes=3 * LIMIT)
    first, second, other = (Reservation(budget, Client(name)) for name in ("a", "a", "b"))
    async with serving({"/": says(bytes(LIMIT)), "/drips": drips(HEAD + b"\r\n", bytes(1000))}) as server:
        await fetcher().fetch(server.url("/"), first)
        assert budget.held_bytes == first.nbytes == LIMIT
        with pytest.raises(OverloadedError, match="This client's requests"):
            await fetcher(max_bytes=10 * LIMIT).fetch(server.url("/drips"), second)
        assert second.nbytes <= LIMIT // 2
        second.release()
        await fetcher().fetch(server.url("/"), other)
        assert budget.held_bytes == 2 * LIMIT
        alone = Reservation(MemoryBudget(max_bytes=LIMIT), Client("a"))
        with pytest.raises(MediaError, match="together larger than 5000 bytes"):  # it will not fit later, either
            await fetcher(max_bytes=10 * LIMIT).fetch(server.url("/drips"), alone)


BROKEN = {
    "no HTTP": b"hello\r\n\r\n",
    "a head without end": HEAD + b"A: " + b"a" * 200_000,
    "a head of many lines": HEAD + b"a:b\r\n" * 2000 + b"\r\n",
    "half a body": HEAD + b"Content-Length: 10\r\n\r\nabc",
    "a length that is none": HEAD + b"Content-Length: -1\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "a length of many digits": HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\nx",
    "another protocol": b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nxxxx",
    "nothing": b"",
}


def raw(content: bytes) -> Answer:
    """Answer with these bytes, and close the connection."""

    async def answer(stream):
        await stream.send_all(content)
        await stream.aclose()

    return answer


BOMB = gzip.compress(bytes(10 * LIMIT))
STATUSES = ("404 Not Found", "500 Oops", "204 No Content", "206 Partial Content", "304 Same")
ELSEWHERE = ("file:///etc/passwd", "data:,a", "ftp://127.0.0.1/", "http://a:b/", "gopher:a", "/" * 8193)
NO_IMAGES = {
    **{name: (raw(content), BROKE) for name, content in BROKEN.items()},
    **{
        status: (says(b"", status=status), f"The server of the image responded with {status[:3]}.")
        for status in STATUSES
    },
    **{f"a redirect to {place[:9]}": (redirects(place), "not followed") for place in ELSEWHERE},
    **{
        f"in {coding}": (says(BOMB, f"Content-Encoding: {coding}"), "compressed")
        for coding in ("gzip", "deflate", "br", "identity, gzip", "x")
    },
}


@pytest.mark.parametrize(("answer", "told"), NO_IMAGES.values(), ids=NO_IMAGES)
async def test_what_is_no_answer_with_an_image_is_refused(answer, told):
    """A bomb is within the limit of bytes before it is unfolded."""
    assert len(BOMB) < LIMIT
    async with serving({"/": answer}) as server:
        assert told in await refused(fetcher(), server.url("/"))
    # Nobody listens at its port any longer.
    assert await refused(fetcher(), server.url("/")) == "The server of the image cannot be reached."


# -- floods -----------------------------------------------------------------------------------------------

CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

FLOODS = {
    "interim answers": (b"", b"HTTP/1.1 100 C\r\n\r\n"),
    "headers": (HEAD, b"a:b\r\n"),
    "a header": (HEAD + b"a:", b"b"),
    "chunks of one byte": (CHUNKED, b"1\r\nX\r\n"),
    "an extension of a chunk": (CHUNKED + b"1;", b"x"),
    "extensions of chunks": (CHUNKED, b"10;%b\r\n0123456789abcdef\r\n" % (b"x" * 1000)),
    "trailers": (CHUNKED + b"0\r\n", b"a:b\r\n"),
    "a trailer": (CHUNKED + b"0\r\na:", b"b"),
}


@pytest.mark.parametrize(("begin", "flood"), FLOODS.values(), ids=FLOODS)
async def test_a_flood_is_left_long_before_the_limits_of_time_and_size(begin, flood):
    sent = 0

    async def answer(stream):
        nonlocal sent
        await stream.send_all(begin)
        while True:
            await stream.send_all(flood * 100)
            sent += len(flood) * 100

    async with serving({"/": answer}) as server:
        with trio.fail_after(30):
            told = await refused(fetcher(max_bytes=10**12), server.url("/"))
    assert told == BROKE
    assert sent < 10**8  # what is read and what the system keeps for who reads it


def in_chunks(size: int, count: int) -> bytes:
    return CHUNKED + b"%x\r\n%b\r\n" % (size, bytes(size)) * count + b"0\r\n\r\n"


MANY = 2000

MANY_STEPS = {
    "interim answers": b"HTTP/1.1 100 C\r\n\r\n" * MANY + HEAD + b"Content-Length: 1\r\n\r\nx",
    "chunks": in_chunks(1, MANY),
}


@pytest.mark.parametrize("content", MANY_STEPS.values(), ids=MANY_STEPS)
async def test_others_have_a_turn_after_each_thing_that_a_server_says(content):
    """Turns are counted from when it is sent, all at once."""
    turns = 0

    async def take_turns():
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async def answer(stream):
        nonlocal turns
        turns = 0
        await stream.send_all(content)

    async with serving({"/": answer}) as server, trio.open_nursery() as nursery:
        nursery.start_soon(take_turns)
        assert await fetcher().fetch(server.url("/"), held())
        nursery.cancel_scope.cancel()
    assert turns >= MANY


async def test_a_long_head_and_small_chunks_are_read_if_there_is_enough_in_them():
    lines = [f"X-{n}: {'a' * 200}" for n in range(100)]
    async with serving({"/": raw(in_chunks(256, 8000)), "/long": says(IMAGE, *lines)}) as server:
        assert await fetched(fetcher(), server.url("/long")) == IMAGE
        assert len(await fetched(fetcher(max_bytes=10**7), server.url("/"))) == 256 * 8000


# -- addresses --------------------------------------------------------------------------------------------

PRIVATE_HOSTS = "127.0.0.1 localhost [::1] 127.1 2130706433 0x7f.1 [::ffff:127.0.0.1] 0 LOCALHOST. no-such-host.invalid"


@pytest.mark.parametrize("host", PRIVATE_HOSTS.split())
async def test_private_addresses_are_not_connected_to(server: ImageServer, host):
    """And refused in the words for a host that does not exist."""
    assert await refused(fetcher(networks=()), server.url("/image", host)) == NO_ADDRESS
    assert server.heads == []


async def test_a_public_name_with_a_private_address_is_not_connected_to(server: ImageServer):
    names = Names(images_example_org=[["127.0.0.1"]], both_example_org=[["8.8.8.8", "127.0.0.1"]])
    for host in ("images.example.org", "both.example.org"):
        assert await refused(fetcher(networks=(), resolver=Resolver(names)), server.url("/image", host)) == NO_ADDRESS
    assert server.heads == []


async def test_a_host_of_very_many_addresses_is_not_connected_to(server: ImageServer, monkeypatch):
    addresses = [f"127.0.1.{n}" for n in range(MAX_ADDRESSES)]
    names = Names(few_test=[["127.0.0.1", *addresses[1:]]], many_test=[["127.0.0.1", *addresses]])
    looked_at: list[str] = []
    monkeypatch.setattr(fetching_module, "is_public", lambda address: not looked_at.append(address))
    fetching = fetcher(networks=(), resolver=Resolver(names))
    assert await refused(fetching, server.url("/image", "many.test")) == NO_ADDRESS
    assert looked_at == []
    assert await fetched(fetching, server.url("/image", "few.test")) == IMAGE
    assert looked_at == ["127.0.0.1", *addresses[1:]]


async def test_a_redirect_to_a_private_address_is_not_followed():
    """One address of this machine is allowed, so that there is something to be redirected by."""
    fetching = fetcher(networks=[ip_network("127.0.0.1")])
    async with serving({"/image": says(IMAGE)}) as inner:
        targets = [inner.url("/image", host) for host in ("127.0.0.2", "[::1]", "10.0.0.1", "169.254.169.254")]
        async with serving({f"/{n}": redirects(target) for n, target in enumerate(targets)}) as outer:
            for n in range(len(targets)):
                assert await refused(fetching, outer.url(f"/{n}")) == NO_ADDRESS
            assert len(outer.heads) == len(targets)
        assert inner.heads == []


async def test_a_name_is_asked_for_once_so_its_second_answer_does_not_matter(server: ImageServer):
    """The next address is tried where nothing listens."""
    names = Names(images_example_org=[["127.0.0.9", "127.0.0.1"], ["10.9.8.7"]])
    assert await fetched(fetcher(resolver=Resolver(names)), server.url("/image", "images.example.org")) == IMAGE
    assert names.asked == ["images.example.org"]
    assert server.header("host") == f"images.example.org:{server.port}"


# -- URLs -------------------------------------------------------------------------------------------------

MALFORMED = "http:// http:///a http://a:b/ http://[::1 https://a:70000/ http://a\0b/ http:a http://.."


@pytest.mark.parametrize("url", MALFORMED.split(" "))
async def test_malformed_urls_are_refused(url):
    with pytest.raises((InvalidRequestError, MediaError)):
        await fetcher().fetch(url, held())


async def test_credentials_are_refused(server: ImageServer):
    assert "credentials" in await refused(fetcher(), server.url("/image", "me:secret@127.0.0.1"), InvalidRequestError)
    server.answers["/image"] = redirects(server.url("/image", "me@127.0.0.1"))
    assert "not followed" in await refused(fetcher(), server.url("/image"))


async def test_only_allowed_hosts_are_asked(server: ImageServer):
    names = {"images_example_org": [["127.0.0.1"]], "example_org": [["127.0.0.1"]], "a_b_test": [["127.0.0.1"]]}
    fetching = fetcher(
        domains=frozenset({"example.org", "*.b.test"}),
        networks=[ip_network("127.0.0.1")],
        resolver=Resolver(Names(**names)),
    )
    for host in ("example.org", "EXAMPLE.org", "example.org.", "a.b.test"):
        assert await fetched(fetching, server.url("/image", host)) == IMAGE
    asked = len(server.heads)
    others = "images.example.org b.test xb.test example.org.evil.test 127.0.0.2 2130706433 evil-example.org"
    for host in others.split():
        assert "--allowed-media-domains" in await refused(fetching, server.url("/image", host), InvalidRequestError)
    server.answers["/image"] = redirects(server.url("/image", "127.0.0.2"))
    assert "not followed" in await refused(fetching, server.url("/image", "example.org"))
    assert len(server.heads) == asked + 1


async def test_addresses_in_listed_networks_are_asked_though_they_are_not_public(server: ImageServer):
    """Whether or not hosts are listed, too; all addresses of a host are in the networks, or public."""
    names = {"example_org": [["127.0.0.1"]], "both_example_org": [["127.0.0.1", "127.0.0.2"]]}
    networks = [ip_network("127.0.0.1"), ip_network("10.0.0.0/8")]
    for domains in (frozenset[str](), frozenset({"*.example.org", "example.org"})):
        fetching = fetcher(domains=domains, networks=networks, resolver=Resolver(Names(**names)))
        for host in ("127.0.0.1", "example.org"):
            assert await fetched(fetching, server.url("/image", host)) == IMAGE
        assert await refused(fetching, server.url("/image", "both.example.org")) == NO_ADDRESS
    for host in ("127.0.0.2", "[::ffff:127.0.0.1]", "[::1]", "169.254.169.254", "192.168.0.1"):
        assert await refused(fetcher(networks=networks), server.url("/image", host)) == NO_ADDRESS


# -- TLS --------------------------------------------------------------------------------------------------


@pytest.fixture
def authority(monkeypatch, tmp_path) -> trustme.CA:
    """An authority that certificates are believed of."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    return authority


def context_for(certificate: trustme.LeafCert, asked: list[str | None]) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    certificate.configure_cert(context)
    context.sni_callback = lambda _, name, __: asked.append(name)
    return context


async def test_the_certificate_is_asked_for_and_looked_at_by_name_at_the_address_that_was_checked(authority):
    asked: list[str | None] = []
    context = context_for(authority.issue_cert("images.example.org"), asked)
    hosts = {"images_example_org": [["127.0.0.1"]], "other_example_org": [["127.0.0.1"]]}
    fetching = fetcher(resolver=Resolver(Names(**hosts)))
    async with serving({"/image": says(IMAGE)}, context) as server:
        assert await fetched(fetching, server.url("/image", "images.example.org", "https")) == IMAGE
        assert asked == ["images.example.org"]
        assert server.header("host") == f"images.example.org:{server.port}"
        assert "cannot be reached" in await refused(fetching, server.url("/image", "other.example.org", "https"))
        assert len(server.heads) == 1
    unknown = context_for(trustme.CA().issue_cert("127.0.0.1"), [])
    async with serving({"/image": says(IMAGE)}, unknown) as server:
        assert "cannot be reached" in await refused(fetching, server.url("/image", scheme="https"))
        assert server.heads == []


# -- cancellation -----------------------------------------------------------------------------------------


async def test_leaving_closes_the_connection():
    closed = trio.Event()

    async def answer(stream):
        try:
            await stream.send_all(HEAD)
            while await stream.receive_some():
                """What is sent is not looked at."""
        finally:  # it may be closed before the first byte is sent
            closed.set()

    fetching = fetcher()
    async with serving({"/": answer}) as server, trio.open_nursery() as nursery:
        nursery.start_soon(fetching.fetch, server.url("/"), held())
        await asked(server, 1)
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True), trio.fail_after(10):
            await closed.wait()
    assert fetching.turns.statistics().borrowed == 0
