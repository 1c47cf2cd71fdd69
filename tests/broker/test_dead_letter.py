"""A dead letter contains all data for a replay, points to its email, and is unchanged after encoding and decoding."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.broker import pointer
from dispatcher.broker.dead_letter import MAX_ERROR_CHARACTERS, decode, encode
from dispatcher.broker.outgoing import Outgoing
from dispatcher.broker.pointer import MAX_BODY_OCTETS, Pointer
from dispatcher.domain.dead_letter import DeadLetter
from dispatcher.domain.outcome import Reason
from dispatcher.domain.status import Status
from dispatcher.errors import InvalidPointer

DEAD_LETTER = DeadLetter(
    email_id=UUID("0192f000-0000-7000-8000-00000000000a"),
    tenant_id="shop",
    message_key="order-17",
    correlation_id="request-9",
    status=Status.FAILED,
    error_type=Reason.REJECTED_RECIPIENT,
    error="550 5.1.1 no such user",
    attempts=2,
    provider="smtp",
    created_at=datetime(2026, 11, 21, 8, 0, tzinfo=UTC),
    failed_at=datetime(2026, 11, 21, 8, 1, 2, 345, tzinfo=UTC),
)


def body(**changes: Any) -> bytes:
    """A valid body with the given changes."""
    return json.dumps(json.loads(encode(DEAD_LETTER)) | changes).encode()


def test_a_dead_letter_survives_encoding_and_decoding() -> None:
    assert decode(encode(DEAD_LETTER)) == DEAD_LETTER


def test_a_text_that_is_too_long_for_a_message_is_truncated() -> None:
    long = "x" * 20_000_000
    body = encode(replace(DEAD_LETTER, tenant_id=long, message_key=long, correlation_id=long, provider=long))

    assert len(body) < MAX_BODY_OCTETS


def test_optional_fields_may_be_absent() -> None:
    absent = {"correlation_id": None, "error_type": None, "error": None, "provider": None}

    decoded = decode(body(**absent))

    assert {name: getattr(decoded, name) for name in absent} == absent


def test_a_dead_letter_that_is_put_back_on_the_send_queue_points_to_its_email() -> None:
    assert pointer.decode(encode(DEAD_LETTER)) == [Pointer(DEAD_LETTER.email_id, DEAD_LETTER.message_key)]


def test_a_long_error_is_cut_so_that_the_dead_letter_can_be_decoded() -> None:
    long = DeadLetter(
        **{name: getattr(DEAD_LETTER, name) for name in DEAD_LETTER.__slots__} | {"error": "\N{SNOWMAN}" * 100_000}
    )

    assert len(encode(long)) < MAX_BODY_OCTETS
    assert decode(encode(long)).error == "\N{SNOWMAN}" * MAX_ERROR_CHARACTERS


def test_the_message_has_the_properties_that_tools_read() -> None:
    message = Outgoing.of_dead_letter("the.dlq", DEAD_LETTER, "trace")

    assert message == Outgoing("the.dlq", encode(DEAD_LETTER), str(DEAD_LETTER.email_id), "request-9", "trace")


@pytest.mark.parametrize(
    "changes",
    [
        {"tenant_id": None}, {"status": "sent"}, {"status": 1}, {"status": []}, {"attempts": -1}, {"attempts": 2**31},
        {"attempts": True}, {"attempts": None}, {"created_at": None}, {"created_at": "yesterday"},
        {"failed_at": "2026-11-21T08:00:00"}, {"error": 7}, {"v": 2},
    ],
    ids=str,
)  # fmt: skip
def test_an_invalid_field_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidPointer):
        decode(body(**changes))


@given(
    st.dictionaries(st.sampled_from(DEAD_LETTER.__slots__), st.none() | st.integers() | st.text() | st.lists(st.text()))
)
def test_any_object_is_decoded_or_refused(changes: dict[str, Any]) -> None:
    with suppress(InvalidPointer):
        assert isinstance(decode(body(**changes)), DeadLetter)
