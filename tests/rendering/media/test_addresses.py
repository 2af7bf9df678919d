"""Which addresses are public, and how hosts become addresses."""

import pytest

from trio_pool_serve.rendering.media.addresses import is_public, resolve

PUBLIC = ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "64:ff9b::8.8.8.8"]

NOT_PUBLIC = {
    "private": ["10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "fc00::1", "fd12:3456::1", "fec0::1"],
    "loopback": ["127.0.0.1", "127.255.255.254", "::1"],
    "link-local": ["169.254.0.1", "169.254.169.254", "fe80::1", "fe80::1%lo"],
    "multicast": ["224.0.0.1", "239.255.255.255", "ff02::1", "ff0e::1"],
    "reserved": ["240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "2001:db8::1", "4000::1"],
    "unspecified": ["0.0.0.0", "0.1.2.3", "::"],
    "shared by a carrier's customers": ["100.64.0.1", "100.127.255.255"],
    "mapped to IPv6": ["::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1"],
    "behind NAT64": ["64:ff9b::127.0.0.1", "64:ff9b::a00:1", "64:ff9b::169.254.169.254", "64:ff9b:1::1"],
    "in a 6to4 network": ["2002:7f00:1::1", "2002:a00:1::", "2002:a9fe:a9fe::"],
    "in Teredo": ["2001:0:4136:e378:8000:63bf:3fff:fdd2"],
    "no address": ["", "localhost", "127.1", "0x7f000001"],
}


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_of_the_internet_are_public(address):
    assert is_public(address)


@pytest.mark.parametrize("addresses", NOT_PUBLIC.values(), ids=NOT_PUBLIC)
def test_no_other_address_is(addresses):
    assert [address for address in addresses if is_public(address)] == []


async def test_a_name_has_the_addresses_that_the_system_knows():
    found = await resolve("localhost", 80)
    assert "127.0.0.1" in found
    assert len(found) == len(set(found))


@pytest.mark.parametrize("host", ["127.1", "0x7f.1", "2130706433", "0177.0.0.1"])
async def test_an_address_in_disguise_is_resolved_to_what_it_is(host):
    assert await resolve(host, 80) == ["127.0.0.1"]


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 64 + ".org", ".", "a..b"])
async def test_a_host_that_does_not_exist_has_no_address(host):
    assert await resolve(host, 80) == []
