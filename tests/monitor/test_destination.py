"""Tests which IP addresses count as public, in any notation."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from dispatcher.transport.destination import is_public


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",  # noqa: S104
        "255.255.255.255", "224.0.0.1", "198.18.0.1", "192.0.2.1", "240.0.0.1",
        "::", "::1", "fe80::1", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::",
        "192.0.0.1", "192.0.0.9", "192.0.0.10", "192.0.0.170", "64:ff9b::1.1.1.1", "64:ff9b:1::1.1.1.1",
        "::1.1.1.1", "::ffff:0:10.0.0.1", "::ffff:192.0.0.9", "fec0::1", "feff::1",
        "192.88.99.1", "3fff::1", "3fff:fff:ffff::1", "5f00::1", "2002:c058:6301::1",
        "2002:a00:1::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    ],
)  # fmt: skip
def test_private_and_special_addresses_are_not_public(text: str) -> None:
    assert not is_public(ip_address(text))


@pytest.mark.parametrize(
    "text",
    ["93.184.215.14", "1.1.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1", "192.0.1.1", "192.88.98.1", "2a00::1"],
)
def test_addresses_on_the_internet_are_public(text: str) -> None:
    assert is_public(ip_address(text))
