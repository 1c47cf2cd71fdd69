"""The token in an envelope sender names its email, and cannot be made without the key."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize("position", range(len("bounces+"), len("bounces+") + 48))
def test_a_token_with_one_other_digit_is_not_valid(position: int) -> None:
    sender = ADDRESS.of(ID)
    digit = "0" if sender[position] != "0" else "1"

    assert ADDRESS.find(sender[:position] + digit + sender[position + 1 :]) is None


def test_only_tokens_of_the_given_keys_are_valid() -> None:
    old = BounceAddress("bounces@example.com", [OLD]).of(ID)

    assert ADDRESS.find(old) is None
    assert BounceAddress("bounces@example.com", [KEY, OLD]).find(old) == ID
    assert BounceAddress("bounces@example.com", [KEY, OLD]).of(ID) == ADDRESS.of(ID)


def test_a_forged_token_does_not_hide_a_valid_token() -> None:
    forged = BounceAddress("bounces@example.com", [OLD]).of(UUID(int=1))

    assert ADDRESS.find(f"{forged}, {ADDRESS.of(ID)}") == ID


def test_a_message_is_a_guess_of_few_tokens() -> None:
    forged = [f"bounces+{ID.hex}{number:016x}@example.com" for number in range(MAX_TOKENS)]

    assert ADDRESS.find(" ".join([*forged[1:], ADDRESS.of(ID)])) == ID
    assert ADDRESS.find(" ".join([*forged[1:], *forged, ADDRESS.of(ID)])) is None


def test_a_text_without_a_token_names_no_email() -> None:
    assert ADDRESS.find("To: bounces@example.com") is None
