"""A pointer is unchanged after encoding and decoding. Decoding anything else raises `InvalidPointer`."""

from __future__ import annotations

import json
import pickle
from contextlib import suppress
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dispatcher.broker.outgoing import Outgoing
from dispatcher.broker.pointer import MAX_BODY_OCTETS, Pointer, decode, encode, encode_bundle
from dispatcher.config import MAX_BUNDLE_EMAILS
from dispatcher.errors import InvalidPointer

EMAIL_ID = UUID("0192f000-0000-7000-8000-00000000000a")
GOOD: dict[str, Any] = {"v": 1, "email_id": str(EMAIL_ID), "message_key": "order-17"}
ENTRY: dict[str, Any] = {"email_id": str(EMAIL_ID), "message_key": "order-17"}
TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"

keys = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=255)
json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def body(**changes: Any) -> bytes:
    """A valid body with the given changes; a field with the value `...` is left out."""
    return json.dumps({name: value for name, value in (GOOD | changes).items() if value is not ...}).encode()


@given(keys)
def test_a_pointer_survives_encoding_and_decoding(key: str) -> None:
    pointer = Pointer(uuid4(), key)

    (decoded,) = decode(encode(pointer))

    assert decoded == pointer
    assert pickle.dumps(decoded.email_id) == pickle.dumps(pointer.email_id), "an ordinary UUID"


def test_a_key_may_have_characters_of_a_newer_unicode() -> None:
    key = "welcome \U0003fffd"
    assert not key.isprintable(), "a newer Python may know this character as printable"

    assert decode(encode(Pointer(EMAIL_ID, key))) == [Pointer(EMAIL_ID, key)]


def test_the_body_contains_only_the_pointer() -> None:
    assert json.loads(encode(Pointer(EMAIL_ID, "order-17", "request-9", TRACEPARENT))) == GOOD


@pytest.mark.parametrize(
    "changes",
    [
        {"v": 2}, {"v": 0}, {"v": True}, {"v": 1.0}, {"v": "1"}, {"v": None}, {"v": ...},
        {"email_id": ...}, {"email_id": None}, {"email_id": 7}, {"email_id": ""}, {"email_id": "order-17"},
        {"email_id": EMAIL_ID.hex}, {"email_id": f"{{{EMAIL_ID}}}"}, {"email_id": f"{EMAIL_ID} "}, {"email_id": [1]},
        {"message_key": ...}, {"message_key": None}, {"message_key": 7}, {"message_key": ""}, {"message_key": {}},
        {"message_key": "a\0b"}, {"message_key": "a\nb"}, {"message_key": "\ud800"}, {"message_key": "k" * 256},
    ],
    ids=str,
)  # fmt: skip
def test_an_invalid_field_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidPointer):
        decode(body(**changes))


@pytest.mark.parametrize(
    "garbage", [b"", b"\xff\xfe", b"null", b"[]", b'"x"', b"1", b"{", b"{}", b"[" * 60_000, body() + b"!"]
)
def test_a_body_that_is_not_an_object_is_refused(garbage: bytes) -> None:
    with pytest.raises(InvalidPointer):
        decode(garbage)


def test_an_oversized_body_is_refused_without_parsing() -> None:
    with pytest.raises(InvalidPointer, match="bytes"):
        decode(body() + b" " * MAX_BODY_OCTETS)


def test_a_refusal_quotes_nothing_from_the_message() -> None:
    for hostile in (body(message_key="ann@example.org\n"), body(email_id="ann@example.org"), body(v="ann@example.org")):
        with pytest.raises(InvalidPointer) as refusal:
            decode(hostile)
        assert "ann" not in str(refusal.value)
        assert refusal.value.__cause__ is None


def test_unknown_fields_are_ignored() -> None:
    assert decode(body(status="failed", more=[1])) == [Pointer(EMAIL_ID, "order-17")]


@given(st.dictionaries(st.sampled_from(["v", "email_id", "message_key"]), json_values))
def test_any_object_is_decoded_or_refused(changes: dict[str, Any]) -> None:
    try:
        (pointer,) = decode(body(**changes))
    except InvalidPointer:
        return
    assert json.loads(encode(pointer)) == json.loads(body(**changes))


def bundle(*emails: Any, **changes: Any) -> bytes:
    """A bundle of these entries; without entries, a bundle of one valid pointer."""
    return json.dumps({"v": 2, "emails": list(emails or [ENTRY]), **changes}).encode()


@given(st.lists(keys, min_size=1, max_size=MAX_BUNDLE_EMAILS))
def test_a_bundle_keeps_its_order(given_keys: list[str]) -> None:
    pointers = [Pointer(uuid4(), key) for key in given_keys]

    assert decode(encode_bundle(pointers)) == pointers


def test_a_bundle_contains_only_pointers() -> None:
    pointers = [Pointer(EMAIL_ID, "order-17", "request-9", TRACEPARENT), Pointer(EMAIL_ID, "order-18")]

    assert json.loads(encode_bundle(pointers)) == {"v": 2, "emails": [ENTRY, ENTRY | {"message_key": "order-18"}]}


def test_the_largest_bundle_is_decoded() -> None:
    pointers = [Pointer(uuid4(), "🦊" * 255) for _ in range(MAX_BUNDLE_EMAILS)]

    assert decode(encode_bundle(pointers)) == pointers


@pytest.mark.parametrize(
    "hostile",
    [
        bundle(emails=[]), bundle(emails=None), bundle(emails={}), bundle(emails="x"), bundle(*[ENTRY] * 51),
        bundle(ENTRY, None), bundle(ENTRY, [ENTRY]), bundle(ENTRY, {}), bundle(ENTRY, ENTRY | {"email_id": "order-17"}),
        bundle(ENTRY, ENTRY | {"message_key": "a\nb"}), bundle(v=3), bundle(v=2.0), bundle(v="2"), bundle(v=True),
        body(v=2), body(v=3), body(v=...), b"[]", b"", b"[" * 60_000, bundle() + b" " * MAX_BODY_OCTETS,
    ],
    ids=lambda hostile: hostile[:40].decode(),
)  # fmt: skip
def test_a_bundle_with_one_invalid_entry_is_refused_as_a_whole(hostile: bytes) -> None:
    with pytest.raises(InvalidPointer):
        decode(hostile)


@given(st.binary(max_size=300) | json_values.map(lambda emails: bundle(emails=emails)))
@example(b'{"v":1,"email_id":"0192f000-0000-7000-8000-00000000000a","message_key":"\\ud800"}')
def test_any_bytes_are_decoded_or_refused(noise: bytes) -> None:
    with suppress(InvalidPointer):
        assert all(isinstance(each, Pointer) for each in decode(noise))


@pytest.mark.parametrize(
    ("count", "most", "sizes"),
    [
        (0, 16, []),
        (1, 1, [1]),
        (3, 1, [1, 1, 1]),
        (1, 16, [1]),
        (16, 16, [16]),
        (18, 16, [9, 9]),
        (33, 16, [11, 11, 11]),
    ],
)
def test_emails_are_spread_evenly_over_as_few_bundles_as_possible(count: int, most: int, sizes: list[int]) -> None:
    pointers = [Pointer(uuid4(), f"order-{number}") for number in range(count)]

    messages, message_of = Outgoing.of_pointers("queue", pointers, most)

    held = [decode(message.body) for message in messages]
    assert [len(each) for each in held] == sizes
    assert [pointer for each in held for pointer in each] == pointers
    assert [held[index] for index in message_of] == [each for each in held for _ in each]


def test_a_correlation_id_too_long_for_amqp_is_left_out() -> None:
    pointer = Pointer(EMAIL_ID, "order-17", "\N{SNOWMAN}" * 255)

    assert Outgoing.of_pointer("q", pointer).correlation_id is None
    assert Outgoing.of_pointer("q", Pointer(EMAIL_ID, "order-17", "x" * 255)).correlation_id == "x" * 255


def test_only_a_message_for_one_email_has_the_properties_that_tools_read() -> None:
    pointers = [Pointer(EMAIL_ID, "order-17", "request-9", TRACEPARENT), Pointer(uuid4(), "order-18", "request-9")]

    (alone,), _ = Outgoing.of_pointers("queue", pointers[:1], 16)
    (together,), _ = Outgoing.of_pointers("queue", pointers, 16)

    assert alone == Outgoing.of_pointer("queue", pointers[0])
    assert (together.message_id, together.correlation_id, together.traceparent) == (str(EMAIL_ID), None, None)
