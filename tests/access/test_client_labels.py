"""By what clients without keys are told apart."""

from ipaddress import ip_network

import pytest

from trio_pool_serve.access.client_labels import ClientLabels

pytestmark = pytest.mark.unit

BEHIND = ClientLabels((ip_network("10.0.0.0/8"), ip_network("fd00::/8")), trusts_unix=True)


@pytest.mark.parametrize(
    ("address", "label"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("::1", "::/64"),
        ("", ""),
    ],
)
def test_an_address_is_a_label_and_ipv6_counts_by_64_bits(address, label):
    assert ClientLabels().label(address, [(b"x-forwarded-for", b"198.51.100.1")]) == label


@pytest.mark.parametrize(
    ("address", "lines", "label"),
    [
        # An address that is no proxy is not believed.
        ("192.0.2.7", [b"198.51.100.1"], "192.0.2.7"),
        ("10.1.1.1", [b"198.51.100.1"], "198.51.100.1"),
        ("::ffff:10.1.1.1", [b"198.51.100.1"], "198.51.100.1"),
        ("fd00::1", [b"2001:db8::5"], "2001:db8::/64"),
        ("", [b"198.51.100.1"], "198.51.100.1"),
        # What a client has made up stands before what the first proxy adds, in the same line or in one of its own.
        ("10.1.1.1", [b"203.0.113.9, 198.51.100.1"], "198.51.100.1"),
        ("10.1.1.1", [b"203.0.113.9", b"198.51.100.1"], "198.51.100.1"),
        ("10.1.1.1", [b"203.0.113.9, 198.51.100.1, 10.2.2.2"], "198.51.100.1"),
        ("10.1.1.1", [b"10.3.3.3, 10.2.2.2"], "10.1.1.1"),
        ("10.1.1.1", [], "10.1.1.1"),
        ("10.1.1.1", [b" , "], "10.1.1.1"),
        # With the client's port, in brackets, or in quotes: the same address is the same client.
        ("10.1.1.1", [b"198.51.100.1:51234"], "198.51.100.1"),
        ("10.1.1.1", [b'"198.51.100.1:51235"'], "198.51.100.1"),
        ("10.1.1.1", [b'"198.51.100.1"'], "198.51.100.1"),
        ("10.1.1.1", [b"[::ffff:198.51.100.1]:80"], "198.51.100.1"),
        ("10.1.1.1", [b"[2001:db8::5]:51234"], "2001:db8::/64"),
        ("10.1.1.1", [b"[2001:db8::6]"], "2001:db8::/64"),
        ("10.1.1.1", [b'"[2001:db8::7]:51235"'], "2001:db8::/64"),
        ("10.1.1.1", [b"198.51.100.1:51234, 10.2.2.2:443, [fd00::2]:80"], "198.51.100.1"),
        ("10.1.1.1", [b'""'], "10.1.1.1"),
        ("10.1.1.1", [b"team-7"], "id:team-7"),
        ("10.1.1.1", [b"tenant:1"], "id:tenant:1"),
        ("10.1.1.1", [b"a\tb\xe4\x1b[0m"], "id:a?b??[0m"),
        ("10.1.1.1", [b"x" * 5000], "id:" + "x" * 128),
    ],
)
def test_a_header_counts_if_a_trusted_proxy_sends_it(address, lines, label):
    headers = [(b"host", b"x"), *((b"x-forwarded-for", line) for line in lines)]
    assert BEHIND.label(address, headers) == label
