"""An API key as its owner has it, and what is stored of it."""

from __future__ import annotations

import pytest

from dispatcher.domain.api_key import Secret, shown


def test_a_new_key_is_read_back_from_its_text_and_is_nobody_elses() -> None:
    key, other = Secret.new(), Secret.new()

    assert Secret.parse(key.text()) == key
    assert key.text().startswith(f"{shown(key.key_id)}_")
    assert (key.key_id, key.secret) != (other.key_id, other.secret)


def test_a_key_matches_what_is_stored_of_it_alone() -> None:
    key = Secret.new()

    assert key.matches(key.hashed())
    assert not key.matches(Secret.new().hashed())
    assert key.secret.encode() not in key.hashed()


def test_a_key_does_not_show_its_secret_when_it_is_printed() -> None:
    key = Secret.new()

    assert key.secret not in repr(key)


@pytest.mark.parametrize(
    "text", ["", "ed_", "ed_k3v9q0xw2m7a", "ed_k3v9q0xw2m7a_" + "x" * 42, "xy_k3v9q0xw2m7a_" + "x" * 43]
)
def test_another_text_is_no_key(text: str) -> None:
    assert Secret.parse(text) is None
