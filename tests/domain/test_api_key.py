"""Tests API keys and their stored hashes."""

from __future__ import annotations

import pytest

from dispatcher.domain.api_key import Secret, shown


def test_a_new_key_is_unique_and_can_be_parsed_from_its_text() -> None:
    key, other = Secret.new(), Secret.new()

    assert Secret.parse(key.text()) == key
    assert key.text().startswith(f"{shown(key.key_id)}_")
    assert (key.key_id, key.secret) != (other.key_id, other.secret)


def test_a_key_matches_only_its_own_hash() -> None:
    key = Secret.new()

    assert key.matches(key.hashed())
    assert not key.matches(Secret.new().hashed())
    assert key.secret.encode() not in key.hashed()


def test_the_repr_of_a_key_hides_its_secret() -> None:
    key = Secret.new()

    assert key.secret not in repr(key)


@pytest.mark.parametrize(
    "text", ["", "ed_", "ed_k3v9q0xw2m7a", "ed_k3v9q0xw2m7a_" + "x" * 42, "xy_k3v9q0xw2m7a_" + "x" * 43]
)
def test_a_malformed_key_is_not_parsed(text: str) -> None:
    assert Secret.parse(text) is None
