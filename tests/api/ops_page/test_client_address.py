"""Which address the limits of the sign-in count."""

from __future__ import annotations

from starlette.requests import Request

from dispatcher.api.ops_page.origins import client_address


def test_the_last_forwarded_address_counts_and_only_behind_a_proxy_on_this_host() -> None:
    def address(client: str, *forwarded: bytes) -> str:
        headers = [(b"x-forwarded-for", each) for each in forwarded]
        return client_address(Request({"type": "http", "client": (client, 1), "headers": headers}))

    assert address("127.0.0.1", b"198.51.100.1, 203.0.113.1") == "203.0.113.1"
    assert address("127.0.0.1", b"198.51.100.1", b"203.0.113.1") == "203.0.113.1"
    assert address("192.0.2.1", b"203.0.113.1") == "192.0.2.1"
    assert address("2001:db8::1") == address("2001:db8::2") == "2001:db8::/64"
