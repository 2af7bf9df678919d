"""The hosts of a server: which there are, which model each computes, and changes while it runs."""

import errno
import itertools
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from attrs import define, field

from tests.conftest import until
from tests.engine.engines import linked_engine
from tests.engine.remote.replicas import Replica, keys_of, request
from tests.scripted_runner import computed_by
from trio_pool_serve.config import SchedulingConfig
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.places import host_list, host_places
from trio_pool_serve.engine.places.host_list import HostList, read_hosts
from trio_pool_serve.engine.places.host_places import HostPlaces
from trio_pool_serve.engine.places.host_state import HostPlace
from trio_pool_serve.engine.remote.connectors import HostAddress, host_connector
from trio_pool_serve.engine.remote.remote_device import RemoteDevice
from trio_pool_serve.errors import EngineLoadingError, InvalidRequestError, NotFoundError
from trio_pool_serve.storage.file_digests import ModelDigest

DIGEST = ModelDigest("f" * 64, "w" * 64)


@define(eq=False)
class Host(Replica):
    """An engine that tells which model it has."""

    model: str = "m"
    identity: str = ""
    digest: ModelDigest = DIGEST

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.about = {"model": self.model, **self.digest._asdict(), "identity": self.identity}


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_places, "CHANGES_S", 0.02)
    monkeypatch.setattr(host_list, "RESOLVE_S", 0.1)
    monkeypatch.setattr(host_places, "host_connector", partial(host_connector, timeout_s=30.0))

    def make(number: int = 0, **options) -> Host:
        return Host(tmp_path / f"{number}.engine", by_tcp=True, **options)

    return make


@define(eq=False)
class Hosts(HostPlaces):
    """The hosts of an API process, and its engines by name."""

    engines: dict[str, Engine] = field(init=False, factory=dict)

    @property
    def engine(self) -> Engine:
        return self.engines["m"]

    @property
    def states(self) -> dict[str, list[str]]:
        return {host["host"]: [engine["state"] for engine in host["engines"]] for host in self.described()}

    def change(self, *hosts: Host | HostPlace) -> None:
        """Have these in the file of the settings, and read it."""
        Path(self.listed.setting).write_text("".join([f"{host.address}\n" for host in hosts]))
        self.read()


@pytest.fixture
def serve(tmp_path: Path):
    @asynccontextmanager
    async def serve(*listed: Host | str, **digests: ModelDigest) -> AsyncIterator[Hosts]:
        """Run an API process of a server with these hosts in its file, and with one model if no other are given."""
        setting = tmp_path / "hosts"
        setting.write_text("".join([f"{getattr(host, 'address', host)}\n" for host in listed]))
        keys = keys_of(tmp_path / "key")
        hosts = Hosts(HostList(str(setting), tmp_path / "hosts.changes"), keys, SchedulingConfig())
        hosts.read()
        digests = digests or {"m": DIGEST}
        async with trio.open_nursery() as nursery:
            for name in digests:
                engine = hosts.engines[name] = linked_engine([], name=name)
                hosts.workers[name] = engine.devices
                await nursery.start(engine.run)
            nursery.start_soon(hosts.run)
            for name, digest in digests.items():
                hosts.serve(name, digest)
            yield hosts
            nursery.cancel_scope.cancel()

    return serve


@asynccontextmanager
async def living(*hosts: Host) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for host in hosts:
            await stack.enter_async_context(host.listen())
            await stack.enter_async_context(host.live())
        yield


def test_hosts_are_read_from_a_list_and_from_a_file(tmp_path):
    listed = [HostAddress("a", 9000), HostAddress("10.0.0.1", 1), HostAddress("::1", 65535)]
    assert read_hosts("a:9000, 10.0.0.1:1,[::1]:65535,") == listed
    (tmp_path / "hosts").write_text("# engines\na:9000\n10.0.0.1:1  # the old one\n\n[::1]:65535\n")
    assert read_hosts(str(tmp_path / "hosts")) == listed
    assert [str(host) for host in listed] == ["a:9000", "10.0.0.1:1", "[::1]:65535"]


@pytest.mark.parametrize(
    "text",
    [
        *("a", "a:", "a:0", "a:65536", ":9000", "a b:9000", "::1:9000", "a:9000;b:9000", "http://a:9000", "ä:1"),
        *("[1.2.3.4]:9000", "[a]:9000", f"[::1%{'x' * 16}]:9000"),
        *("a..b:9000", ".:9000", ".a:9000", f"{'a' * 64}:9000", f"{'a.' * 127}a:9000"),
    ],
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        read_hosts(f"{text},")


def test_more_hosts_than_there_can_be_links_are_refused(monkeypatch):
    monkeypatch.setattr(host_list, "MAX_HOSTS", 2)
    with pytest.raises(ValueError, match="lists 3 hosts; the limit is 2"):
        read_hosts("a:1,b:1,c:1")


async def test_each_engine_computes_the_model_whose_files_it_has(make, serve):
    other = ModelDigest("o" * 64, "w" * 64)
    first, second = make(0), make(1, model="o", digest=other)
    async with living(first, second), serve(first, second, m=DIGEST, another=other) as hosts:
        for name, engine in hosts.engines.items():
            await engine.wait_ready()
            for _ in range(3):
                await engine.submit(request(5))
            assert sum((first if name == "m" else second).runner.rows) == 3
        assert [host["engines"][0]["model"] for host in hosts.described()] == ["m", "another"]


OTHERS = {
    "another model": ("x", ModelDigest("x" * 64, "w" * 64), "it computes x, which this server does not serve"),
    "other settings": ("m", ModelDigest("x" * 64, "w" * 64), "files or settings for m differ from this server"),
    "other weights": ("m", ModelDigest("f" * 64, "x" * 64), "files or settings for m differ from this server"),
}


@pytest.mark.parametrize(("model", "digest", "reason"), OTHERS.values(), ids=OTHERS)
async def test_an_engine_with_another_model_is_refused_and_says_why(make, serve, model, digest, reason):
    host = make(model=model, digest=digest)
    async with living(host), serve(host) as hosts:
        await until(lambda: hosts.places and next(iter(hosts.places.values())).link.failure)
        (described,) = hosts.described()[0]["engines"]
        assert described["state"] == "connecting"
        assert reason in described["reason"]
        with pytest.raises(EngineLoadingError):
            await hosts.engine.submit(request(5))


async def test_a_server_without_weights_takes_those_of_its_first_engine_until_all_with_them_have_left(make, serve):
    first, second = make(0), make(1, digest=ModelDigest(DIGEST.files, "x" * 64))
    async with living(first, second), serve(first, m=ModelDigest(DIGEST.files, "")) as hosts:
        await hosts.engine.wait_ready()
        hosts.change(first, second)
        await until(lambda: len(hosts.places) == 2)
        await until(lambda: [link.link.failure for link in hosts.places.values()][1])
        assert hosts.states == {str(first.address): ["ready"], str(second.address): ["connecting"]}
        hosts.change(second)
        await until(lambda: hosts.states == {str(second.address): ["ready"]})


async def test_engines_that_compute_in_other_data_types_are_told_apart(make, serve, caplog):
    first, second = make(1, identity="1"), make(2, identity="2")
    first.runner.computed_by, second.runner.computed_by = computed_by("1" * 16), computed_by("2" * 16, "bfloat16")
    async with living(first, second), serve(first) as hosts:
        await hosts.engine.wait_ready()
        assert hosts.workers["m"].facts.computed_by == ("1" * 16, "float32", "torch")
        hosts.change(first, second)
        await until(lambda: len(hosts.engine.queue.dispatcher.devices) == 2)
        both = (f"{'1' * 16}, {'2' * 16}", "bfloat16, float32", "torch")
        assert hosts.workers["m"].facts.computed_by == both
        assert [host["engines"][0]["dtype"] for host in hosts.described()] == ["float32", "bfloat16"]
        assert "the engines of m compute with different fingerprints: " in caplog.text
        hosts.change(second)
        await until(lambda: hosts.workers["m"].facts.computed_by == ("2" * 16, "bfloat16", "torch"))


async def test_hosts_join_and_leave_with_the_file_and_one_that_leaves_computes_what_it_has_first(make, serve):
    first, second = make(0), make(1)
    outputs = []
    async with living(first, second), serve(first) as hosts, trio.open_nursery() as nursery:
        await hosts.engine.wait_ready()
        first.runner.gate.clear()

        async def ask() -> None:
            outputs.append(await hosts.engine.submit(request(5)))

        nursery.start_soon(ask)
        await until(lambda: first.engine.statistics().in_flight_batches)
        hosts.change(second)
        await until(lambda: hosts.states[str(second.address)] == ["ready"])
        assert hosts.states[str(first.address)] == ["draining"]
        first.runner.gate.set()
        await until(lambda: hosts.states == {str(second.address): ["ready"]})
        await until(lambda: outputs and not first.engine.connections)


async def test_a_host_that_leaves_without_rows_gets_none_in_the_same_moment(make, serve):
    first, second = make(0), make(1)
    async with living(first, second), serve(first, second) as hosts, trio.open_nursery() as nursery:
        await until(lambda: len(hosts.engine.queue.dispatcher.devices) == 2)
        leaving = hosts.places[first.address].link
        hosts.change(second)
        hosts._update(nursery)
        assert leaving in hosts.engine.queue.dispatcher.devices, "its task has not run since"
        assert not leaving.takes_rows
        await hosts.engine.submit_all([request(5)] * 5)


async def test_two_changes_in_the_same_moment_are_both_read(serve, tmp_path):
    async with serve("127.0.0.1:1") as one, serve("127.0.0.1:1") as other:
        await until(lambda: one.states == other.states == {"127.0.0.1:1": ["connecting"]})
        one.add("127.0.0.1:2")
        await until(lambda: len(other.states) == 2)
        changes = tmp_path / "hosts.changes"
        modified = changes.stat().st_mtime_ns
        one.add("127.0.0.1:3")
        os.utime(changes, ns=(modified, modified))
        await until(lambda: len(other.states) == 3)


async def test_hosts_are_added_and_drained_for_all_processes_of_the_server(make, serve):
    first, second = make(0), make(1)
    async with living(first, second), serve(first) as one, serve(first) as other:
        for hosts in (one, other):
            await hosts.engine.wait_ready()
        one.add(f" {second.address} ")
        both_ready = {str(first.address): ["ready"], str(second.address): ["ready"]}
        await until(lambda: one.states == other.states == both_ready)
        other.drain(f" {first.address} ")
        one_drained = {**both_ready, str(first.address): ["draining"]}
        await until(lambda: one.states == other.states == one_drained)
        one.add(str(first.address))
        await until(lambda: one.states == other.states == both_ready)


async def test_changes_of_hosts_that_make_no_sense_are_refused(serve, monkeypatch):
    monkeypatch.setattr(host_places, "MAX_HOSTS", 1)
    async with serve("127.0.0.1:1") as hosts:
        with pytest.raises(InvalidRequestError, match="limit of 1 hosts"):
            hosts.add("127.0.0.1:2")
        with pytest.raises(InvalidRequestError, match="is not HOST:PORT"):
            hosts.add("nothing")
        with pytest.raises(NotFoundError):
            hosts.drain("127.0.0.1:2")
        await until(lambda: hosts.states == {"127.0.0.1:1": ["connecting"]})
        hosts.add("127.0.0.1:1")
        await until(lambda: hosts.states == {"127.0.0.1:1": ["connecting"]})


@define
class Names(trio.abc.HostnameResolver):
    """The addresses that one name has, as a name server would tell."""

    addresses: list[str] | None = field(factory=list)

    async def getaddrinfo(self, host, port, family=0, type=0, proto=0, flags=0):  # noqa: A002  (trio's names)
        if self.addresses is None:
            raise socket.gaierror(errno.EAGAIN, "no name server answers")
        kind = socket.AF_INET
        return [(kind, socket.SOCK_STREAM, 6, "", (address, int(port))) for address in self.addresses]

    async def getnameinfo(self, sockaddr, flags):
        raise NotImplementedError


async def test_a_name_stands_for_an_engine_at_each_of_its_addresses(make, serve):
    """As that of a headless service in Kubernetes, which follows the number of its pods."""
    names = Names()
    trio.socket.set_custom_hostname_resolver(names)
    first, second = make(0), make(1)
    async with living(first):
        port = first.address.port
        name, second.listening = f"engines:{port}", trio.socket.socket()
        await second.listening.bind(("127.0.0.2", port))
        second.listening.listen()
        with second.listening:
            async with second.live(), serve(name) as hosts:
                names.addresses = ["127.0.0.1"]
                await until(lambda: hosts.states == {name: ["ready"]})
                names.addresses = ["127.0.0.1", "127.0.0.2"]
                await until(lambda: hosts.states == {name: ["ready", "ready"]})
                names.addresses = None
                await trio.sleep(0.3)
                assert hosts.states == {name: ["ready", "ready"]}, "what cannot be resolved now is as it was"
                names.addresses = ["127.0.0.2"]
                await until(lambda: hosts.states == {name: ["ready"]})
                hosts.drain(f"127.0.0.2:{port}")
                await until(lambda: hosts.states == {name: ["draining"]})


async def test_two_names_of_one_address_both_stand_for_it(make, serve):
    trio.socket.set_custom_hostname_resolver(Names(["127.0.0.1"]))
    async with living(host := make()), serve(f"one:{host.address.port}", f"two:{host.address.port}") as hosts:
        await hosts.engine.wait_ready()
        for name in ("one", "two", "127.0.0.1"):
            hosts.drain(f"{name}:{host.address.port}")
            assert [known.state for known in hosts.places.values()] == ["draining"], name
            hosts.add(f"two:{host.address.port}")
            assert [known.state for known in hosts.places.values()] == ["ready"], name


async def test_an_engine_at_two_addresses_is_one_engine_and_the_second_is_used_when_the_first_is_gone(make, serve):
    """As one with an address by IPv4 and another by IPv6: twice its rate would be counted."""
    host = make(identity="the process")
    addresses = "127.0.0.1", "127.0.0.2"
    async with (
        host.listen("0.0.0.0"),
        host.live(),
        serve(*[f"{address}:{host.address.port}" for address in addresses]) as hosts,
    ):
        await until(lambda: sorted(itertools.chain(*hosts.states.values())) == ["connecting", "ready"])
        await until(lambda: any("it is the same engine as at" in known.link.failure for known in hosts.places.values()))
        assert len(hosts.engine.queue.dispatcher.devices) == 1
        (used,) = [known for known in hosts.places.values() if known.link.hello is not None]
        (other,) = [known for known in hosts.places.values() if known is not used]
        hosts.change(other)
        await until(lambda: hosts.states == {str(other.address): ["ready"]})


async def test_names_that_hang_or_cannot_be_encoded_hold_up_no_other_host_and_no_change(make, serve, caplog):
    class Hanging(Names):
        async def getaddrinfo(self, host, *arguments, **options):
            if host == b"hangs":
                await trio.sleep_forever()
            if host == b"wrong":
                "a..b".encode("idna")
            return await super().getaddrinfo(host, *arguments, **options)

    trio.socket.set_custom_hostname_resolver(Hanging(["127.0.0.1"]))
    first, second = make(0), make(1)
    async with living(first, second):
        good = f"good:{second.address.port}"
        async with serve("hangs:9000", "wrong:1", first, good) as hosts:
            ready = {"hangs:9000": [], "wrong:1": [], str(first.address): ["ready"], good: ["ready"]}
            await until(lambda: hosts.states == ready)
            await until(lambda: "the host wrong:1 cannot be resolved" in caplog.text)
            hosts.drain(str(first.address))
            await until(lambda: hosts.states[str(first.address)] == ["draining"])


async def test_a_link_that_fails_as_it_should_not_is_begun_anew_and_no_other_ends(make, serve, monkeypatch, caplog):
    first, second = make(0), make(1)
    run, failed = RemoteDevice.run, []

    async def fail_once(link: RemoteDevice) -> None:
        if link.connector.name == str(first.address) and not failed:
            failed.append(link)
            raise ZeroDivisionError
        await run(link)

    monkeypatch.setattr(RemoteDevice, "run", fail_once)
    async with living(first, second), serve(first, second) as hosts:
        await until(lambda: hosts.states == {str(host.address): ["ready"] for host in (first, second)})
        assert failed
        assert f"the link to the engine at {first.address} failed" in caplog.text


async def test_the_links_are_in_the_metrics(make, serve):
    async with living(host := make()), serve(host) as hosts:
        await hosts.engine.wait_ready()
        (family,) = hosts.families()
        found = {(labels["address"], labels["of"]): value for _, labels, value in family.samples}
        assert found[str(host.address), "connected"] == 1
        assert found[str(host.address), "losses"] == 0
