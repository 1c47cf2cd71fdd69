"""Which addresses a key may send from."""

from __future__ import annotations

import idna

from dispatcher.domain.address import parse_address
from dispatcher.store.api_keys import ApiKey


def may_send_from(sender: str, key: ApiKey) -> bool:
    """Whether a key may send from a valid address."""
    if key.sender_domains is None and key.sender_addresses is None:
        return True
    address = parse_address(sender)
    domain = comparable_domain(address.domain)
    if domain in (key.sender_domains or ()):
        return True
    return f"{address.local.lower()}@{domain}" in (key.sender_addresses or ())


def comparable_domain(domain: str) -> str:
    """A domain in the one form in which domains are compared: lower case, as it stands in DNS."""
    lowered = domain.lower().rstrip(".")
    if lowered.isascii():
        return lowered
    try:
        return idna.encode(lowered, uts46=True).decode()
    except idna.IDNAError:
        return lowered


def comparable_address(text: str) -> str:
    """An address in the one form in which addresses are compared.

    Raises:
        ValueError: it is none.
    """
    address = parse_address(text)
    return f"{address.local.lower()}@{comparable_domain(address.domain)}"
