"""Hashes addresses with the database's key, so that events and suppressions need no address in the clear."""

from __future__ import annotations

import hmac
from contextlib import suppress
from typing import Final

import idna

from dispatcher.store.statements import Source, fetch

HASH_OCTETS: Final = 16


class AddressHasher:
    """Hashes addresses and domains with one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    async def open(cls, source: Source) -> AddressHasher:
        """Reads the key that `dispatcher init` gave the database.

        Raises:
            StoreUnavailable: PostgreSQL cannot be reached.
        """
        ((key,),) = await fetch(source, "find_address_key")
        return cls(bytes(key))

    def hash(self, address: str) -> bytes:
        """The hash of an address, with or without a display name; 16 bytes. Ignores case, as almost all servers do."""
        return hmac.digest(self._key, normalised(address).encode(), "sha256")[:HASH_OCTETS]

    def hash_domain(self, address_or_domain: str) -> bytes:
        """The hash of a domain, or of the domain of an address; 16 bytes. Never equals the hash of an address."""
        domain = normalised(address_or_domain).rpartition("@")[2]
        return hmac.digest(self._key, f"@{domain}".encode(), "sha256")[:HASH_OCTETS]


def normalised(address: str) -> str:
    """The address without its display name, in lower case, with its domain in the form that DNS uses (Punycode).

    Never fails: if the domain is not valid, it stays as it is.
    """
    if address.endswith(">"):
        address = address[address.rfind("<") + 1 : -1]
    address = address.strip().lower()
    if address.isascii():
        return address
    local, at, domain = address.rpartition("@")
    with suppress(idna.IDNAError):
        domain = idna.encode(domain, uts46=True).decode("ascii")
    return f"{local}{at}{domain}"
