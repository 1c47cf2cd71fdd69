"""Converts sender addresses and domains to a canonical form, so that they can be compared."""

from __future__ import annotations

from functools import lru_cache
from unicodedata import normalize


def comparable_domain(domain: str) -> str:
    """A domain's canonical form for comparison: in lower case, and internationalized domains as A-labels (`xn--…`)."""
    lowered = domain.lower().rstrip(".")
    if lowered.isascii():
        return lowered
    import idna  # imported here, because it is rarely needed and slow to import

    try:
        return idna.encode(lowered, uts46=True).decode()
    except idna.IDNAError:
        return lowered


@lru_cache(1024)
def comparable_address(text: str) -> str:
    """An address's canonical form for comparison, without its display name.

    Raises:
        ValueError: The address is not valid.
    """
    from dispatcher.domain.address import parse_address  # imported here, because most commands compare only domains

    address = parse_address(text)
    return f"{normalize('NFC', address.local.lower())}@{comparable_domain(address.domain)}"
