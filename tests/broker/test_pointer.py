"""Pointers, bundles and dead letters are unchanged after encoding and decoding. Decoding anything else raises
`InvalidPointer`."""

from __future__ import annotations

import json
import pickle
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dispatcher.broker import dead_letter
from dispatcher.broker.outgoing import Outgoing
from dispatcher.broker.pointer import MAX_BODY_OCTETS, Pointer, decode, encode, encode_bundle
from dispatcher.config import MAX_BUNDLE_EMAILS
from dispatcher.domain.dead_letter import DeadLetter
from dispatcher.domain.outcome import Reason
from dispatcher.domain.status import Status
from dispatcher.errors import InvalidPointer

EMAIL_ID = UUID("0192f000-0000-7000-8000-00000000000a")
ENTRY: dict[str, Any] = {"email_id": str(EMAIL_ID), "message_key": "order-17"}
GOOD = {"v": 1, **ENTRY}
TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"
DEAD_LETTER = DeadLetter(
    email_id=EMAIL_ID,
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

keys = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=255)
json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def body(**changes: Any) -> bytes:
    """A valid body with the given changes; a field with the value `...` is left out."""
    return json.dumps({name: value for name, value in (GOOD | changes).items() if value is not ...}).encode()


def bundle(*emails: Any, **changes: Any) -> bytes:
    """A bundle of these entries; without entries, a bundle of one valid pointer."""
    return json.dumps({"v": 2, "emails": list(emails or [ENTRY]), **changes}).encode()


def letter(**changes: Any) -> bytes:
    return json.dumps(json.loads(dead_letter.encode(DEAD_LETTER)) | changes).encode()


@given(keys)
@example("welcome \U0003fffd")  # a character of a newer Unicode, which is not printable for this Python
def test_a_pointer_survives_encoding_and_decoding(key: str) -> None:
    pointer = Pointer(uuid4(), key)

    (decoded,) = decode(encode(pointer))

    assert decoded == pointer
    assert pickle.dumps(decoded.email_id) == pickle.dumps(pointer.email_id), "an ordinary UUID"


@settings(max_examples=25)
@given(st.lists(keys, min_size=1, max_size=MAX_BUNDLE_EMAILS))
@example(["🦊" * 255] * MAX_BUNDLE_EMAILS)
def test_a_bundle_keeps_its_order(given_keys: list[str]) -> None:
    pointers = [Pointer(uuid4(), key) for key in given_keys]

    assert decode(encode_bundle(pointers)) == pointers


def test_a_body_contains_only_pointers_and_unknown_fields_are_ignored() -> None:
    pointers = [Pointer(EMAIL_ID, "order-17", "request-9", TRACEPARENT), Pointer(EMAIL_ID, "order-18")]

    assert json.loads(encode(pointers[0])) == GOOD
    assert json.loads(encode_bundle(pointers)) == {"v": 2, "emails": [ENTRY, ENTRY | {"message_key": "order-18"}]}
    assert decode(body(status="failed", more=[1])) == [Pointer(EMAIL_ID, "order-17")]


@pytest.mark.parametrize(
    "hostile",
    [
        *(body(v=version) for version in (2, 0, 3, True, 1.0, "1", None, ...)),
        *(body(email_id=given) for given in (..., None, 7, "", "order-17", EMAIL_ID.hex, f"{{{EMAIL_ID}}}")),
        *(body(message_key=given) for given in (..., None, 7, "", "a\0b", "a\nb", "\ud800", "k" * 256)),
        body(email_id=f"{EMAIL_ID} "), body(email_id=[1]), body(message_key={}),
        b"", b"\xff\xfe", b"null", b"[]", b'"x"', b"1", b"{", b"{}", b"[" * 60_000, body() + b"!",
        bundle(emails=[]), bundle(emails=None), bundle(emails={}), bundle(emails="x"), bundle(*[ENTRY] * 51),
        bundle(ENTRY, None),
        bundle(ENTRY, [ENTRY]), bundle(ENTRY, {}), bundle(ENTRY, ENTRY | {"email_id": "order-17"}),
        bundle(ENTRY, ENTRY | {"message_key": "a\nb"}), *(bundle(v=version) for version in (3, 2.0, "2", True)),
        bundle() + b" " * MAX_BODY_OCTETS,
    ],
    ids=lambda hostile: hostile[:80].decode("latin-1"),
)  # fmt: skip
def test_a_body_with_an_invalid_field_or_entry_is_refused_as_a_whole(hostile: bytes) -> None:
    with pytest.raises(InvalidPointer):
        decode(hostile)


def test_a_refusal_quotes_nothing_from_the_message() -> None:
    for hostile in (body(message_key="ann@example.org\n"), body(email_id="ann@example.org"), body(v="ann@example.org")):
        with pytest.raises(InvalidPointer) as refusal:
            decode(hostile)
        assert "ann" not in str(refusal.value)
        assert refusal.value.__cause__ is None


@settings(max_examples=30)
@given(st.dictionaries(st.sampled_from(["v", "email_id", "message_key"]), json_values))
def test_any_object_is_decoded_or_refused(changes: dict[str, Any]) -> None:
    with suppress(InvalidPointer):
        (pointer,) = decode(body(**changes))
        assert json.loads(encode(pointer)) == json.loads(body(**changes))


@pytest.mark.parametrize(
    ("count", "most", "sizes"),
    [
        (0, 16, []), (1, 1, [1]), (3, 1, [1, 1, 1]), (1, 16, [1]), (16, 16, [16]), (18, 16, [9, 9]),
        (33, 16, [11, 11, 11]),
    ],
)  # fmt: skip
def test_emails_are_spread_evenly_over_as_few_bundles_as_possible(count: int, most: int, sizes: list[int]) -> None:
    pointers = [Pointer(uuid4(), f"order-{number}") for number in range(count)]

    messages, message_of = Outgoing.of_pointers("queue", pointers, most)

    held = [decode(message.body) for message in messages]
    assert [len(each) for each in held] == sizes
    assert [pointer for each in held for pointer in each] == pointers
    assert [held[index] for index in message_of] == [each for each in held for _ in each]


def test_a_correlation_id_too_long_for_amqp_is_left_out() -> None:
    for text, expected in ("\N{SNOWMAN}" * 255, None), ("x" * 255, "x" * 255):
        assert Outgoing.of_pointer("q", Pointer(EMAIL_ID, "order-17", text)).correlation_id == expected


def test_only_a_message_for_one_email_has_the_properties_that_tools_read() -> None:
    pointers = [Pointer(EMAIL_ID, "order-17", "request-9", TRACEPARENT), Pointer(uuid4(), "order-18", "request-9")]

    (alone,), _ = Outgoing.of_pointers("queue", pointers[:1], 16)
    (together,), _ = Outgoing.of_pointers("queue", pointers, 16)

    assert alone == Outgoing.of_pointer("queue", pointers[0])
    assert (together.message_id, together.correlation_id, together.traceparent) == (str(EMAIL_ID), None, None)
    dead = Outgoing.of_dead_letter("the.dlq", DEAD_LETTER, "trace")
    assert dead == Outgoing("the.dlq", dead_letter.encode(DEAD_LETTER), str(EMAIL_ID), "request-9", "trace")


def test_a_dead_letter_survives_encoding_and_decoding_also_without_its_optional_fields() -> None:
    absent = {"correlation_id": None, "error_type": None, "error": None, "provider": None}

    for each in (DEAD_LETTER, replace(DEAD_LETTER, channel="sms")):
        assert dead_letter.decode(dead_letter.encode(each)) == each
    decoded = dead_letter.decode(letter(**absent))
    assert {name: getattr(decoded, name) for name in absent} == absent


def test_a_dead_letter_that_is_put_back_on_the_send_queue_points_to_its_email() -> None:
    assert decode(dead_letter.encode(DEAD_LETTER)) == [Pointer(EMAIL_ID, DEAD_LETTER.message_key)]


def test_texts_that_are_too_long_for_a_dead_letter_are_truncated() -> None:
    long, snow = "x" * 20_000_000, "\N{SNOWMAN}" * 100_000
    of_long = replace(DEAD_LETTER, tenant_id=long, message_key=long, correlation_id=long, provider=long)
    of_snow = dead_letter.encode(replace(DEAD_LETTER, error=snow))

    assert len(dead_letter.encode(of_long)) < MAX_BODY_OCTETS
    assert len(of_snow) < MAX_BODY_OCTETS
    assert dead_letter.decode(of_snow).error == snow[: dead_letter.MAX_ERROR_CHARACTERS]


@pytest.mark.parametrize(
    "changes",
    [
        {"tenant_id": None}, {"status": "sent"}, {"status": 1}, {"status": []}, {"attempts": -1}, {"attempts": 2**31},
        {"attempts": True}, {"attempts": None}, {"created_at": None}, {"created_at": "yesterday"},
        {"failed_at": "2026-11-21T08:00:00"}, {"error": 7}, {"v": 2},
    ],
    ids=str,
)  # fmt: skip
def test_a_dead_letter_with_an_invalid_field_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidPointer):
        dead_letter.decode(letter(**changes))


@settings(max_examples=30)
@given(st.dictionaries(st.sampled_from(DEAD_LETTER.__slots__), json_values))
def test_any_dead_letter_is_decoded_or_refused(changes: dict[str, Any]) -> None:
    with suppress(InvalidPointer):
        assert isinstance(dead_letter.decode(letter(**changes)), DeadLetter)
