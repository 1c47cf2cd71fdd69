"""Hashes addresses with a secret key, so that the tables of events and suppressions need not store the addresses.

`dispatcher init` creates the key, one for each database, and stores it in the database.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import sha256
from hmac import compare_digest
from typing import Final
from unicodedata import normalize
from uuid import UUID

from dispatcher.domain.phone import comparable_number
from dispatcher.store.comparable_address import comparable_domain
from dispatcher.store.statements import Source, fetch

HASH_OCTETS: Final = 16
TOKEN_CHARACTERS: Final = 4 * HASH_OCTETS
"""The length of an unsubscribe token: 48 bytes in base64. The bytes are an email's id, a hash and a signature."""
_TOKEN: Final = re.compile(rf"[A-Za-z0-9_-]{{{TOKEN_CHARACTERS}}}", re.ASCII)
BLOCK_OCTETS: Final = 64
"""The block size of SHA-256."""
_HALF: Final = 1 << 64
_ROUNDS: Final = 4
"""Of a Feistel network: after four rounds of a keyed hash, a sealed id looks like a random number."""
_DOTS: Final = ".\u3002\uff0e\uff61"
"""What separates labels of a domain (UTS 46, section 4). A dot at the end is the root of DNS."""


class AddressHasher:
    """Hashes addresses and domains with the secret key of a database."""

    def __init__(self, key: bytes) -> None:
        # This is HMAC-SHA-256 (RFC 2104), with the two blocks of the key hashed only once. `hmac.digest` would hash
        # these blocks for every recipient, and take more than twice as long.
        block = (sha256(key).digest() if len(key) > BLOCK_OCTETS else key).ljust(BLOCK_OCTETS, b"\0")
        self._inner = sha256(bytes([octet ^ 0x36 for octet in block]))
        self._outer = sha256(bytes([octet ^ 0x5C for octet in block]))

    @classmethod
    async def open(cls, source: Source) -> AddressHasher:
        """Reads the key from the database, and returns a hasher that uses this key."""
        ((key,),) = await fetch(source, "find_address_key")
        return cls(bytes(key))

    def hash(self, address: str) -> bytes:
        """The hash of an address, with or without a display name: 16 bytes.

        Addresses that differ only in upper and lower case have the same hash, because almost all servers ignore case.
        """
        return self._digest(normalised(address))

    def hash_domain(self, address_or_domain: str) -> bytes:
        """The hash of a domain, or of the domain of an address: 16 bytes. Never equals the hash of an address."""
        domain = normalised(address_or_domain).rpartition("@")[2]
        return self._digest(f"@{domain}")

    def suppressing_hashes(self, address: str, topic: str | None) -> list[bytes]:
        """The hashes of the entries that suppress an address for emails with a topic, or for those without (None)."""
        hashes = [self.hash(address), self.hash_domain(address)]
        return hashes if topic is None else [*hashes, *(hash_with_topic(each, topic) for each in hashes)]

    def unsubscribe_token(self, email_id: UUID, address: str) -> str:
        """A token of 64 characters for the unsubscribe link of one recipient of an email. Only who has the database's
        secret key can create it, so a request with the token comes from a link in this email."""
        content = email_id.bytes + self.hash(address)
        return urlsafe_b64encode(content + self._signature(content)).decode()

    def read_unsubscribe_token(self, token: str) -> tuple[UUID, bytes] | None:
        """The id of the email and the hash of the recipient; None if the token is invalid or forged."""
        if not is_unsubscribe_token(token):
            return None
        octets = urlsafe_b64decode(token)
        content, signature = octets[: 2 * HASH_OCTETS], octets[2 * HASH_OCTETS :]
        if not compare_digest(signature, self._signature(content)):
            return None
        return UUID(bytes=content[:HASH_OCTETS]), content[HASH_OCTETS:]

    def sealed(self, email_id: UUID, reader: str) -> UUID:
        """The id of an email as a cursor that shows a reader, such as a tenant, nothing about the email."""
        left, right = divmod(email_id.int, _HALF)
        for number in range(_ROUNDS):
            left, right = right, left ^ self._mask(number, right, reader)
        return UUID(int=left * _HALF + right)

    def unsealed(self, cursor: UUID, reader: str) -> UUID:
        """The id from which `sealed` made a cursor for this reader; a random id for any other cursor."""
        left, right = divmod(cursor.int, _HALF)
        for number in reversed(range(_ROUNDS)):
            left, right = right ^ self._mask(number, left, reader), left
        return UUID(int=left * _HALF + right)

    def _mask(self, number: int, half: int, reader: str) -> int:
        return int.from_bytes(self._digest(f"\0cursor {number} {half} {reader}")[:8], "big")

    def _signature(self, content: bytes) -> bytes:
        # The signed text begins with a NUL. The text of an address or a domain never does, so the hash of an address
        # or a domain cannot serve as a signature.
        return self._digest(f"\0unsubscribe {content.hex()}")

    def _digest(self, text: str) -> bytes:
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(text.encode())
        outer.update(inner.digest())
        return outer.digest()[:HASH_OCTETS]


def hash_with_topic(address_hash: bytes, topic: str) -> bytes:
    """The `address_hash` of an entry with a topic; see `entry_key` in suppression.sql."""
    return sha256(address_hash + topic.encode()).digest()[:HASH_OCTETS]


def is_unsubscribe_token(text: str) -> bool:
    """Whether a text has the form of an unsubscribe token, which may be forged."""
    return _TOKEN.fullmatch(text) is not None


def normalised(address: str) -> str:
    """The form of an address that all its spellings share: without display name and quotes, in lower case, composed
    (Unicode's NFC), with its domain in the form that DNS uses (Punycode, no dot at the end).

    Never fails: a domain that is not valid is only changed to lower case.
    """
    if address.endswith(">"):
        address = address[address.rfind("<") + 1 : -1]
    address = address.strip().rstrip(_DOTS).lower()
    if address.startswith('"'):
        address = address.replace('"', "")
    if address.isascii():
        return comparable_number(address) if address.startswith("+") else address
    local, at, domain = address.rpartition("@")
    return f"{normalize('NFC', local)}{at}{comparable_domain(domain)}"
