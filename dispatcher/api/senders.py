"""The sender addresses that an API key allows."""

from __future__ import annotations

import idna

from dispatcher.domain.address import parse_address
from dispatcher.store.api_keys import ApiKey


def may_send_from(sender: str, key: ApiKey) -> bool:
    """Whether a key allows a valid sender address."""
    if key.sender_domains is None and key.sender_addresses is None:
        return True
    address = parse_address(sender)
    domain = comparable_domain(address.domain)
    if domain in (key.sender_domains or ()):
        return True
    return f"{address.local.lower()}@{domain}" in (key.sender_addresses or ())


def comparable_domain(domain: str) -> str:
    """A domain's canonical form for comparison: in lower case; an internationalized domain as A-labels (`xn--…`)."""
    lowered = domain.lower().rstrip(".")
    if lowered.isascii():
        return lowered
    try:
        return idna.encode(lowered, uts46=True).decode()
    except idna.IDNAError:
        return lowered


def comparable_address(text: str) -> str:
    """An address's canonical form for comparison.

    Raises:
        ValueError: the address is invalid.
    """
    address = parse_address(text)
    return f"{address.local.lower()}@{comparable_domain(address.domain)}"
