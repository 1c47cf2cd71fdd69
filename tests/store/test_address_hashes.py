"""Hashes of addresses: equal for every way to write one address, different for everything else."""

from __future__ import annotations

import hmac

import pytest

from dispatcher.store.address_hashes import AddressHasher, normalised

HASHER = AddressHasher(b"k" * 32)
WRITTEN = (
    "Ann@Example.COM",
    "Ann <ann@example.com>",
    '"Ann, of shop" <ANN@example.com>',
    " ann@example.com ",
    "ann@example.com.",
    "Ann <ann@example.com.>",
    '"ann"@example.com',
    "ann@example.com\u3002",
    "ann@\uff45xample.com",
)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *((each, "ann@example.com") for each in WRITTEN),
        ("jos\u00e9@example.com", "jose\u0301@example.com"),
        ("JOS\u00c9@example.com", "JOSE\u0301@example.com"),
        ("\u1ec7@example.com", "e\u0302\u0323@example.com"),
        ("ann@gr\u00fcn.example", "ann@gru\u0308n.example"),
        ("ann@b\u00fccher.example", "ann@XN--BCHER-KVA.example."),
        ("ann..b@docomo.example.org", 'Ann <"ann..b"@docomo.example.org>'),
        ("+525512345678", "+5215512345678"),
        ("+541123456789", "+5491123456789"),
        ("+551187654321", "+5511987654321"),
        ("+22997123456", "+2290197123456"),
    ],
)
def test_every_way_to_write_an_address_or_a_number_has_one_hash(one: str, other: str) -> None:
    assert HASHER.hash(one) == HASHER.hash(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("+15512345678", "+115512345678"),  # no other country drops a 1
        ("+551123456789", "+5511923456789"),  # a landline of Brazil has no 9
        ("+521551234567", "+52551234567"),  # too short for a number with a 1
        ("+5215512345678@example.com", "+525512345678@example.com"),
    ],
)
def test_numbers_and_addresses_that_only_look_alike_have_different_hashes(one: str, other: str) -> None:
    assert HASHER.hash(one) != HASHER.hash(other)


@pytest.mark.parametrize("octets", [1, 32, 64, 65, 200])
def test_the_hash_is_the_first_half_of_hmac_sha256(octets: int) -> None:
    key = bytes(range(octets))

    assert AddressHasher(key).hash("ann@example.com") == hmac.digest(key, b"ann@example.com", "sha256")[:16]
    assert AddressHasher(key).hash_domain("example.com") == hmac.digest(key, b"@example.com", "sha256")[:16]


def test_a_domain_hashes_as_dns_writes_it() -> None:
    assert normalised("ann@BÜCHER.example") == "ann@xn--bcher-kva.example"
    assert normalised("ann@ü..example") == "ann@ü..example", "an invalid domain does not raise"
    # A composed address keeps the hash that is stored already.
    assert normalised("Jos\u00e9@B\u00fccher.example") == "jos\u00e9@xn--bcher-kva.example"
    for written in ("ann@bücher.example", "ann@bu\u0308cher.example", "ann@XN--BCHER-KVA.example."):
        assert HASHER.hash_domain(written) == HASHER.hash_domain("xn--bcher-kva.example")


def test_addresses_domains_and_keys_never_share_a_hash() -> None:
    other_key = AddressHasher(b"x" * 32)
    hashes = {
        HASHER.hash("ann@example.com"),
        HASHER.hash("bob@example.com"),
        HASHER.hash("example.com"),
        HASHER.hash_domain("example.com"),
        other_key.hash("ann@example.com"),
    }
    assert len(hashes) == 5
