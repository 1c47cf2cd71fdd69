"""Texts that only we can make: the token in an envelope sender, which names its email, and API keys."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.domain.api_key import Secret, shown
from dispatcher.domain.bounce_address import MAX_MAILBOX_OCTETS, MAX_TOKENS, BounceAddress

KEY = b"a key of at least 32 characters, one"
OLD = b"a key of at least 32 characters, two"
ID = UUID("0193581f-6c00-7abc-8def-0123456789ab")
ADDRESS = BounceAddress("bounces@example.com", [KEY])


@given(st.uuids())
def test_the_token_of_an_envelope_sender_is_valid_in_any_case(email_id: UUID) -> None:
    sender = ADDRESS.of(email_id)

    assert ADDRESS.find(f"To: <{sender}>") == email_id
    assert ADDRESS.find(f"X-Original-To: {sender.upper()}") == email_id
    assert sender.startswith("bounces+")
    assert sender.endswith("@example.com")


def test_the_local_part_has_at_most_64_octets() -> None:
    sender = BounceAddress("b" * MAX_MAILBOX_OCTETS + "@example.com", [KEY]).of(ID)

    assert len(sender.partition("@")[0]) == 64


def test_a_token_with_one_other_digit_is_not_valid() -> None:
    sender = ADDRESS.of(ID)
    for position in range(len("bounces+"), len("bounces+") + 48):
        digit = "0" if sender[position] != "0" else "1"
        assert ADDRESS.find(sender[:position] + digit + sender[position + 1 :]) is None, position


def test_only_tokens_of_the_given_keys_are_valid() -> None:
    old = BounceAddress("bounces@example.com", [OLD]).of(ID)

    assert ADDRESS.find(old) is None
    assert BounceAddress("bounces@example.com", [KEY, OLD]).find(old) == ID
    assert BounceAddress("bounces@example.com", [KEY, OLD]).of(ID) == ADDRESS.of(ID)


def test_a_message_is_a_guess_of_few_tokens_and_a_forged_token_does_not_hide_a_valid_one() -> None:
    forged = [f"bounces+{ID.hex}{number:016x}@example.com" for number in range(MAX_TOKENS)]

    assert ADDRESS.find(" ".join([*forged[1:], ADDRESS.of(ID)])) == ID
    assert ADDRESS.find(" ".join([*forged[1:], *forged, ADDRESS.of(ID)])) is None
    assert ADDRESS.find("To: bounces@example.com") is None


def test_a_new_key_is_unique_and_can_be_parsed_from_its_text() -> None:
    key, other = Secret.new(), Secret.new()

    assert Secret.parse(key.text()) == key
    assert key.text().startswith(f"{shown(key.key_id)}_")
    assert (key.key_id, key.secret) != (other.key_id, other.secret)


def test_a_key_matches_only_its_own_hash_and_shows_its_secret_nowhere() -> None:
    key = Secret.new()

    assert key.matches(key.hashed())
    assert not key.matches(Secret.new().hashed())
    assert key.secret.encode() not in key.hashed()
    assert key.secret not in repr(key)


@pytest.mark.parametrize(
    "text", ["", "ed_", "ed_k3v9q0xw2m7a", "ed_k3v9q0xw2m7a_" + "x" * 42, "xy_k3v9q0xw2m7a_" + "x" * 43]
)
def test_a_malformed_key_is_not_parsed(text: str) -> None:
    assert Secret.parse(text) is None
