"""The hosts of a server: which there are, which model each computes, and changes while it runs."""

import errno
import itertools
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from attrs import define, field

from tests.engine.remote.replicas import Replica, keys_of, request, until
from tests.scripted_runner import described
from trio_pool_serve.config import SchedulingConfig
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.places import host_places
from trio_pool_serve.engine.places.host_places import HostList, HostPlace, HostPlaces, read_hosts
from trio_pool_serve.engine.remote.connectors import HostAddress, host_connector
from trio_pool_serve.engine.remote.remote_device import RemoteDevice
from trio_pool_serve.engine.remote.remote_workers import RemoteWorkers
from trio_pool_serve.errors import EngineLoadingError, InvalidRequestError, NotFoundError
from trio_pool_serve.storage.file_digests import ModelDigest
from trio_pool_serve.telemetry.metrics import Metrics

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
    monkeypatch.setattr(host_places, "RESOLVE_S", 0.1)
    monkeypatch.setattr(host_places, "host_connector", partial(host_connector, timeout_s=30.0))

    def make(number: int = 0, **options) -> Host:
        return Host(tmp_path / f"{number}.engine", by_tcp=True, **options)

    return make


@define(eq=False)
class Hosts(HostPlaces):
    """The hosts of an API process, and its engines by name."""

    engines: dict[str, Engine] = field(init=False, factory=dict)

    def change(self, *hosts: Host | HostPlace) -> None:
        """Have these in the file of the settings, and read it."""
        Path(self.listed.setting).write_text("".join([f"{host.address}\n" for host in hosts]))
        self.read()


@define(eq=False)
class Server:
    """An API process and its hosts."""

    folder: Path
    setting: str
    digests: dict[str, ModelDigest] = field(factory=lambda: {"m": DIGEST})
    hosts: Hosts = field(init=False)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[Hosts]:
        keys = keys_of(self.folder / "key")
        self.hosts = Hosts(HostList(self.setting, self.folder / "hosts.changes"), keys, SchedulingConfig())
        self.hosts.read()
        async with trio.open_nursery() as nursery:
            for name in self.digests:
                workers = self.hosts.workers[name] = RemoteWorkers([], Metrics().of_engine(name))
                engine = self.hosts.engines[name] = Engine(workers)
                await nursery.start(engine.run)
            nursery.start_soon(self.hosts.run)
            for name, digest in self.digests.items():
                self.hosts.serve(name, digest)
            yield self.hosts
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def living(*hosts: Host) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        ready = [trio.Event() for _ in hosts]

        async def live(host: Host, is_ready: trio.Event) -> None:
            async with host.listen(), host.live():
                is_ready.set()
                await trio.sleep_forever()

        for host, is_ready in zip(hosts, ready, strict=True):
            nursery.start_soon(live, host, is_ready)
        for is_ready in ready:
            await is_ready.wait()
        yield
        nursery.cancel_scope.cancel()


def states(hosts: HostPlaces) -> dict[str, list[str]]:
    return {host["host"]: [engine["state"] for engine in host["engines"]] for host in hosts.described()}


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
    monkeypatch.setattr(host_places, "MAX_HOSTS", 2)
    with pytest.raises(ValueError, match="3 hosts are more than 2"):
        read_hosts("a:1,b:1,c:1")


async def test_each_engine_computes_the_model_whose_files_it_has(make, tmp_path):
    other = ModelDigest("o" * 64, "w" * 64)
    first, second = make(0), make(1, model="o", digest=other)
    async with living(first, second):
        setting = f"{first.address},{second.address}"
        async with Server(tmp_path, setting, {"m": DIGEST, "another": other}).run() as hosts:
            for name, engine in hosts.engines.items():
                await engine.wait_ready()
                for _ in range(3):
                    await engine.submit(request(5))
                assert sum((first if name == "m" else second).runner.rows) == 3
            assert [host["engines"][0]["model"] for host in hosts.described()] == ["m", "another"]


OTHERS = {
    "another model": ("x", ModelDigest("x" * 64, "w" * 64), "this server does not serve its model x"),
    "other settings": ("m", ModelDigest("x" * 64, "w" * 64), "files or settings for m are not"),
    "other weights": ("m", ModelDigest("f" * 64, "x" * 64), "files or settings for m are not"),
}


@pytest.mark.parametrize(("model", "digest", "reason"), OTHERS.values(), ids=OTHERS)
async def test_an_engine_with_another_model_is_refused_and_says_why(make, tmp_path, model, digest, reason):
    host = make(model=model, digest=digest)
    async with living(host), Server(tmp_path, str(host.address)).run() as hosts:
        await until(lambda: hosts.places and next(iter(hosts.places.values())).link.failure)
        (described,) = hosts.described()[0]["engines"]
        assert described["state"] == "connecting"
        assert reason in described["reason"]
        with pytest.raises(EngineLoadingError):
            await hosts.engines["m"].submit(request(5))


async def test_a_server_without_weights_takes_those_of_its_first_engine(make, tmp_path):
    first, second = make(0), make(1, digest=ModelDigest(DIGEST.files, "x" * 64))
    async with living(first, second):
        (tmp_path / "hosts").write_text(f"{first.address}\n")
        server = Server(tmp_path, str(tmp_path / "hosts"), {"m": ModelDigest(DIGEST.files, "")})
        async with server.run() as hosts:
            await hosts.engines["m"].wait_ready()
            hosts.change(first, second)
            await until(lambda: len(hosts.places) == 2)
            await until(lambda: [link.link.failure for link in hosts.places.values()][1])
            assert states(hosts) == {str(first.address): ["ready"], str(second.address): ["connecting"]}


async def test_engines_that_compute_in_other_data_types_are_told_apart(make, tmp_path, caplog):
    first, second = make(1, identity="1"), make(2, identity="2")
    first.runner.description, second.runner.description = described("1" * 16), described("2" * 16, "bfloat16")
    async with living(first, second):
        (tmp_path / "hosts").write_text(f"{first.address}\n")
        async with Server(tmp_path, str(tmp_path / "hosts")).run() as hosts:
            await hosts.engines["m"].wait_ready()
            assert hosts.workers["m"].computed_by == ("1" * 16, "float32", "torch")
            hosts.change(first, second)
            await until(lambda: len(hosts.engines["m"].dispatcher.devices) == 2)
            both = (f"{'1' * 16}, {'2' * 16}", "bfloat16, float32", "torch")
            assert hosts.workers["m"].computed_by == both
            assert [host["engines"][0]["dtype"] for host in hosts.described()] == ["float32", "bfloat16"]
            assert "the engines of m differ: " in caplog.text
            hosts.change(second)
            await until(lambda: hosts.workers["m"].computed_by == ("2" * 16, "bfloat16", "torch"))


async def test_the_weights_of_engines_that_have_all_left_count_no_longer(make, tmp_path):
    first, second = make(0), make(1, digest=ModelDigest(DIGEST.files, "x" * 64))
    async with living(first, second):
        (tmp_path / "hosts").write_text(f"{first.address}\n")
        server = Server(tmp_path, str(tmp_path / "hosts"), {"m": ModelDigest(DIGEST.files, "")})
        async with server.run() as hosts:
            await hosts.engines["m"].wait_ready()
            hosts.change(second)
            await until(lambda: states(hosts) == {str(second.address): ["ready"]})


async def test_hosts_join_and_leave_with_the_file(make, tmp_path):
    first, second = make(0), make(1)
    async with living(first, second):
        path = tmp_path / "hosts"
        path.write_text(f"{first.address}\n")
        async with Server(tmp_path, str(path)).run() as hosts:
            engine = hosts.engines["m"]
            await engine.wait_ready()
            hosts.change(second)
            await until(lambda: states(hosts) == {str(second.address): ["ready"]})
            await until(lambda: not first.engine.connections)
            await engine.submit_all([request(5)] * 5)
            assert (sum(first.runner.rows), sum(second.runner.rows)) == (0, 5)


async def test_a_host_that_leaves_computes_what_it_has_first(make, tmp_path):
    first, second = make(0), make(1)
    outputs = []
    async with living(first, second):
        path = tmp_path / "hosts"
        path.write_text(f"{first.address}\n")
        async with Server(tmp_path, str(path)).run() as hosts, trio.open_nursery() as nursery:
            engine = hosts.engines["m"]
            await engine.wait_ready()
            first.runner.gate.clear()

            async def ask() -> None:
                outputs.append(await engine.submit(request(5)))

            nursery.start_soon(ask)
            await until(lambda: first.engine.worker.statistics().in_flight_batches)
            hosts.change(second)
            await until(lambda: states(hosts)[str(second.address)] == ["ready"])
            assert states(hosts)[str(first.address)] == ["draining"]
            first.runner.gate.set()
            await until(lambda: states(hosts) == {str(second.address): ["ready"]})
            await until(lambda: outputs)


async def test_a_host_that_leaves_without_rows_gets_none_in_the_same_moment(make, tmp_path):
    first, second = make(0), make(1)
    async with living(first, second):
        path = tmp_path / "hosts"
        path.write_text(f"{first.address}\n{second.address}\n")
        async with Server(tmp_path, str(path)).run() as hosts, trio.open_nursery() as nursery:
            engine = hosts.engines["m"]
            await until(lambda: len(engine.dispatcher.devices) == 2)
            leaving = hosts.places[first.address].link
            hosts.change(second)
            hosts._update(nursery)
            assert leaving in engine.dispatcher.devices, "its task has not run since"
            assert not leaving.takes_rows
            await engine.submit_all([request(5)] * 5)


async def test_two_changes_in_the_same_moment_are_both_read(make, tmp_path):
    async with Server(tmp_path, "127.0.0.1:1").run() as one, Server(tmp_path, "127.0.0.1:1").run() as other:
        await until(lambda: states(one) == states(other) == {"127.0.0.1:1": ["connecting"]})
        one.add("127.0.0.1:2")
        await until(lambda: len(states(other)) == 2)
        changes = tmp_path / "hosts.changes"
        modified = changes.stat().st_mtime_ns
        one.add("127.0.0.1:3")
        os.utime(changes, ns=(modified, modified))
        await until(lambda: len(states(other)) == 3)


async def test_hosts_are_added_and_drained_for_all_processes_of_the_server(make, tmp_path):
    first, second = make(0), make(1)
    async with living(first, second):
        setting = str(first.address)
        async with Server(tmp_path, setting).run() as one, Server(tmp_path, setting).run() as other:
            for hosts in (one, other):
                await hosts.engines["m"].wait_ready()
            one.add(str(second.address))
            both_ready = {str(first.address): ["ready"], str(second.address): ["ready"]}
            await until(lambda: states(one) == states(other) == both_ready)
            other.drain(str(first.address))
            one_drained = {**both_ready, str(first.address): ["draining"]}
            await until(lambda: states(one) == states(other) == one_drained)
            one.add(str(first.address))
            await until(lambda: states(one) == states(other) == both_ready)


async def test_changes_of_hosts_that_make_no_sense_are_refused(make, tmp_path):
    async with Server(tmp_path, "127.0.0.1:1").run() as hosts:
        with pytest.raises(InvalidRequestError, match="is not HOST:PORT"):
            hosts.add("nothing")
        with pytest.raises(NotFoundError):
            hosts.drain("127.0.0.1:2")
        await until(lambda: states(hosts) == {"127.0.0.1:1": ["connecting"]})
        hosts.add("127.0.0.1:1")
        await until(lambda: states(hosts) == {"127.0.0.1:1": ["connecting"]})


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


async def test_a_name_stands_for_an_engine_at_each_of_its_addresses(make, tmp_path):
    """As that of a headless service in Kubernetes, which follows the number of its pods."""
    names = Names()
    trio.socket.set_custom_hostname_resolver(names)
    first, second = make(0), make(1)
    async with first.listen("127.0.0.1"), first.live(), trio.open_nursery() as nursery:
        port = first.address.port
        listening = socket.create_server(("127.0.0.2", port))
        second.listening = trio.socket.from_stdlib_socket(listening)
        async with second.live():
            names.addresses = ["127.0.0.1"]
            async with Server(tmp_path, f"engines:{port}").run() as hosts:
                name = f"engines:{port}"
                await until(lambda: states(hosts) == {name: ["ready"]})
                names.addresses = ["127.0.0.1", "127.0.0.2"]
                await until(lambda: states(hosts) == {name: ["ready", "ready"]})
                names.addresses = None
                await trio.sleep(0.3)
                assert states(hosts) == {name: ["ready", "ready"]}, "what cannot be resolved now is as it was"
                names.addresses = ["127.0.0.2"]
                await until(lambda: states(hosts) == {name: ["ready"]})
                hosts.drain(f"127.0.0.2:{port}")
                await until(lambda: states(hosts) == {name: ["draining"]})
        nursery.cancel_scope.cancel()
    listening.close()


async def test_two_names_of_one_address_both_stand_for_it(make, tmp_path):
    trio.socket.set_custom_hostname_resolver(Names(["127.0.0.1"]))
    host = make()
    async with living(host):
        port = host.address.port
        async with Server(tmp_path, f"one:{port},two:{port}").run() as hosts:
            await hosts.engines["m"].wait_ready()
            for name in (f"one:{port}", f"two:{port}", f"127.0.0.1:{port}"):
                hosts.drain(name)
                assert [known.state for known in hosts.places.values()] == ["draining"], name
                hosts.add(f"two:{port}")
                assert [known.state for known in hosts.places.values()] == ["ready"], name


async def test_an_engine_at_two_addresses_is_one_engine_and_the_second_is_used_when_the_first_is_gone(make, tmp_path):
    """As one with an address by IPv4 and another by IPv6: twice its rate would be counted."""
    host = make(identity="the process")
    async with host.listen("0.0.0.0"), host.live():
        port = host.address.port
        path = tmp_path / "hosts"
        path.write_text(f"127.0.0.1:{port}\n127.0.0.2:{port}\n")
        async with Server(tmp_path, str(path)).run() as hosts:
            engine = hosts.engines["m"]
            await until(lambda: sorted(itertools.chain(*states(hosts).values())) == ["connecting", "ready"])
            await until(lambda: any("it is the engine at" in known.link.failure for known in hosts.places.values()))
            assert len(engine.dispatcher.devices) == 1
            (used,) = [known for known in hosts.places.values() if known.link.hello is not None]
            (other,) = [known for known in hosts.places.values() if known is not used]
            hosts.change(other)
            await until(lambda: states(hosts) == {str(other.address): ["ready"]})


async def test_hosts_are_drained_by_what_they_were_added_by(make, tmp_path):
    host = make()
    async with living(host), Server(tmp_path, str(host.address)).run() as hosts:
        await hosts.engines["m"].wait_ready()
        hosts.drain(f" {host.address} ")
        assert states(hosts) == {str(host.address): ["draining"]}
        hosts.add(f" {host.address} ")
        assert states(hosts) == {str(host.address): ["ready"]}


async def test_a_name_that_is_never_resolved_holds_up_no_other_host_and_no_change(make, tmp_path, monkeypatch):
    class Hanging(Names):
        async def getaddrinfo(self, host, *arguments, **options):
            if host == b"hangs":
                await trio.sleep_forever()
            return await super().getaddrinfo(host, *arguments, **options)

    trio.socket.set_custom_hostname_resolver(Hanging(["127.0.0.1"]))
    first, second = make(0), make(1)
    async with (
        living(first, second),
        Server(tmp_path, f"hangs:9000,{first.address},good:{second.address.port}").run() as hosts,
    ):
        ready = {"hangs:9000": [], str(first.address): ["ready"], f"good:{second.address.port}": ["ready"]}
        await until(lambda: states(hosts) == ready)
        hosts.drain(str(first.address))
        await until(lambda: states(hosts)[str(first.address)] == ["draining"])


async def test_a_name_that_cannot_be_encoded_is_one_that_cannot_be_resolved(make, tmp_path, caplog):
    class Encoding(Names):
        async def getaddrinfo(self, host, *arguments, **options):
            "a..b".encode("idna")

    trio.socket.set_custom_hostname_resolver(Encoding())
    host = make()
    async with living(host), Server(tmp_path, f"name:1,{host.address}").run() as hosts:
        await hosts.engines["m"].wait_ready()
        await until(lambda: "the host name:1 cannot be resolved" in caplog.text)


async def test_a_link_that_fails_as_it_should_not_is_begun_anew_and_no_other_ends(make, tmp_path, monkeypatch, caplog):
    first, second = make(0), make(1)
    run, failed = RemoteDevice.run, []

    async def fail_once(link: RemoteDevice) -> None:
        if link.connector.name == str(first.address) and not failed:
            failed.append(link)
            raise ZeroDivisionError
        await run(link)

    monkeypatch.setattr(RemoteDevice, "run", fail_once)
    async with living(first, second), Server(tmp_path, f"{first.address},{second.address}").run() as hosts:
        await until(lambda: states(hosts) == {str(host.address): ["ready"] for host in (first, second)})
        assert failed
        assert f"the link to the engine at {first.address} has failed" in caplog.text


async def test_the_links_are_in_the_metrics(make, tmp_path):
    host = make()
    async with living(host), Server(tmp_path, str(host.address)).run() as hosts:
        await hosts.engines["m"].wait_ready()
        (family,) = hosts.families()
        found = {(labels["address"], labels["of"]): value for _, labels, value in family.samples}
        assert found[str(host.address), "connected"] == 1
        assert found[str(host.address), "losses"] == 0
