"""An email is unchanged after conversion to JSON and back."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.domain.email import Email
from dispatcher.domain.outgoing import Attachment
from dispatcher.domain.status import OnUncertain
from dispatcher.errors import InvalidEmail

PLAIN = {"message_key": "k", "from": "shop@example.com", "to": ["ann@example.org"], "subject": "Hi", "text": "Hi"}
FILE = {"filename": "a.txt", "content_type": "text/plain", "content": "aGk="}

printable = st.characters(exclude_categories=["C", "Z"])
keys = st.text(printable, min_size=1, max_size=20)
lines = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=40).filter(
    lambda text: "=?" not in text
)
bodies = st.none() | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
addresses = st.lists(
    st.sampled_from(["ann@example.org", "Ann <ann@example.org>", '"A, B" <a.b@example.org>', "ü <ü@bücher.example>"]),
    max_size=3,
).map(tuple)
attachments = st.builds(
    Attachment,
    st.text("abc .ü😀", min_size=1).filter(lambda name: name.strip(". ")),
    st.sampled_from(["text/plain", "application/vnd.ms-excel", "image/svg+xml"]),
    st.binary(max_size=50),
)
emails = st.builds(
    Email,
    message_key=keys,
    sender=st.just("Shop <shop@example.com>"),
    to=addresses.filter(bool),
    cc=addresses,
    bcc=addresses,
    reply_to=addresses,
    subject=lines,
    text=bodies,
    html=bodies.map(lambda html: html or "<p>Hi</p>"),
    headers=st.dictionaries(st.text("xyz-", min_size=1, max_size=5).map("X-{}".format), lines, max_size=3),
    attachments=st.lists(attachments, max_size=2),
    tags=st.lists(keys, max_size=3, unique=True),
    tenant_id=st.from_regex(r"[a-z][a-z0-9._:-]{0,20}", fullmatch=True),
    correlation_id=st.none() | keys,
    on_uncertain=st.none() | st.sampled_from(OnUncertain),
    erase_after_sending=st.booleans(),
)


def refusal(document: object) -> tuple[str, str]:
    """The field and the reason of the error for a document."""
    with pytest.raises(InvalidEmail) as caught:
        Email.from_json(document)
    return caught.value.field, caught.value.reason


@given(emails)
@settings(deadline=None)
def test_an_email_survives_conversion_to_json_and_back(email: Email) -> None:
    again = Email.from_json(orjson.loads(orjson.dumps(email.to_json())))

    assert again == email
    assert list(again.headers) == list(email.headers)
    assert again.payload_hash() == email.payload_hash()
    assert again == Email.from_json(json.loads(json.dumps(email.to_json())))


def test_every_field_has_its_json_name() -> None:
    document = {
        "message_key": "order-17",
        "tenant_id": "acme",
        "from": "Shop <shop@example.com>",
        "to": ["ann@example.org"],
        "cc": ["cc@example.org"],
        "bcc": ["bcc@example.org"],
        "reply_to": ["help@example.com"],
        "subject": "Hi",
        "text": "Hi",
        "html": "<p>Hi</p>",
        "headers": {"X-Order": "17"},
        "attachments": [FILE],
        "tags": ["receipt"],
        "correlation_id": "request-1",
        "on_uncertain": "resend",
        "erase_after_sending": True,
        "send_at": "2026-11-21T10:00:00Z",
        "expires_at": "2026-11-21T10:00:00.500000Z",
        "lane": "urgent",
    }

    email = Email.from_json(document)

    assert email == Email(
        message_key="order-17",
        tenant_id="acme",
        sender="Shop <shop@example.com>",
        to="ann@example.org",
        cc="cc@example.org",
        bcc="bcc@example.org",
        reply_to="help@example.com",
        subject="Hi",
        text="Hi",
        html="<p>Hi</p>",
        headers={"X-Order": "17"},
        attachments=[Attachment("a.txt", "text/plain", b"hi")],
        tags=["receipt"],
        correlation_id="request-1",
        on_uncertain=OnUncertain.RESEND,
        erase_after_sending=True,
        send_at=datetime(2026, 11, 21, 10, tzinfo=UTC),
        expires_at=datetime(2026, 11, 21, 10, 0, 0, 500_000, tzinfo=UTC),
        lane="urgent",
    )
    assert email.to_json() == document


def test_a_single_address_needs_no_list_and_null_counts_as_absent() -> None:
    absent: dict[str, object] = dict.fromkeys(
        [
            *("cc", "html", "headers", "attachments", "tags", "correlation_id", "on_uncertain", "tenant_id"),
            *("erase_after_sending", "send_at", "expires_at", "lane"),
        ]
    )

    assert Email.from_json(PLAIN | absent | {"to": "ann@example.org"}) == Email.from_json(PLAIN)


def test_an_email_with_only_bcc_recipients_needs_no_to() -> None:
    document = {name: value for name, value in PLAIN.items() if name != "to"}

    assert Email.from_json(document | {"bcc": ["ann@example.org"]}).to == ()
    assert refusal(document) == ("to", "has no recipient; give at least one in to, cc or bcc")


def test_the_document_is_not_changed() -> None:
    document = PLAIN | {"attachments": [FILE], "cc": None}
    before = json.dumps(document)

    Email.from_json(document)

    assert json.dumps(document) == before


@pytest.mark.parametrize("name", ["message_key", "from", "subject"])
def test_a_refusal_names_the_missing_field(name: str) -> None:
    reason = "is required unless template_id is set" if name == "subject" else "is required"

    assert refusal({key: value for key, value in PLAIN.items() if key != name}) == (name, reason)
    assert refusal(PLAIN | {name: None}) == (name, reason)


@pytest.mark.parametrize("document", [None, [], "email", 17, [PLAIN], b"{}"])
def test_a_document_that_is_not_an_object_is_refused(document: object) -> None:
    assert refusal(document) == ("email", "must be a JSON object")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("From", "From"),
        ("subject ", "subject "),
        ("a\r\nb\x1b[31m", "a??b?[31m"),
        ("\u202e\ud800", "??"),
        ("x" * 1_000_000, "x" * 40 + "…"),
        (7, "int"),
    ],
)
def test_the_name_of_an_unknown_field_is_made_printable(name: object, shown: str) -> None:
    document: dict[Any, Any] = dict(PLAIN)
    document[name] = 1

    assert refusal(document) == (shown, "is not a field of an email; check the spelling")


def test_the_refusal_of_sender_names_the_field_from() -> None:
    assert refusal({**PLAIN, "sender": "shop@example.com"}) == (
        "sender",
        "is not a field of an email; the field is named from",
    )


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"message_key": 1}, "message_key"),
        ({"message_key": True}, "message_key"),
        ({"from": ["shop@example.com"]}, "from"),
        ({"from": {"email": "shop@example.com"}}, "from"),
        ({"to": {"email": "ann@example.org"}}, "to"),
        ({"to": 1}, "to"),
        ({"to": [["ann@example.org"]]}, "to[0]"),
        ({"to": [None]}, "to[0]"),
        ({"subject": 1.5}, "subject"),
        ({"text": ["Hi"]}, "text"),
        ({"html": {}}, "html"),
        ({"headers": []}, "headers"),
        ({"headers": {"X-A": 1}}, "headers.X-A"),
        ({"tags": {}}, "tags"),
        ({"tags": [1]}, "tags[0]"),
        ({"tenant_id": 1}, "tenant_id"),
        ({"correlation_id": 1}, "correlation_id"),
        ({"on_uncertain": True}, "on_uncertain"),
        ({"on_uncertain": "HOLD"}, "on_uncertain"),
        ({"erase_after_sending": "true"}, "erase_after_sending"),
        ({"attachments": {}}, "attachments"),
        ({"attachments": "a.txt"}, "attachments"),
        ({"attachments": [FILE] * 101}, "attachments"),
        ({"attachments": ["a.txt"]}, "attachments[0]"),
        ({"attachments": [FILE, FILE | {"type": "text/plain"}]}, "attachments[1].type"),
        ({"attachments": [{"filename": "a", "content": ""}]}, "attachments[0].content_type"),
        ({"attachments": [FILE | {"filename": None}]}, "attachments[0].filename"),
        ({"attachments": [FILE | {"filename": 1}]}, "attachments[0].filename"),
        ({"attachments": [FILE, FILE | {"filename": "../a"}]}, "attachments[1].filename"),
        ({"attachments": [FILE | {"content_type": "text"}]}, "attachments[0].content_type"),
        ({"attachments": [FILE | {"content_type": []}]}, "attachments[0].content_type"),
        ({"attachments": [FILE | {"content": 1}]}, "attachments[0].content"),
        ({"attachments": [FILE | {"content": "aGk"}]}, "attachments[0].content"),
        ({"attachments": [FILE | {"content": "aGk=="}]}, "attachments[0].content"),
        ({"attachments": [FILE | {"content": "aGk=\n"}]}, "attachments[0].content"),
        ({"attachments": [FILE | {"content": "a G k ="}]}, "attachments[0].content"),
        ({"attachments": [FILE | {"content": "aG-_"}]}, "attachments[0].content"),
        ({"attachments": [FILE | {"content": "=aGk"}]}, "attachments[0].content"),
        ({"attachments": [FILE | {"content": "aGk=aGk="}]}, "attachments[0].content"),
        ({"attachments": [FILE | {"content": "aGk=" * 300_000}]}, "attachments[0].content"),
        ({"attachments": [FILE | {"content": "aGlp" * 300_000 + "aGk"}]}, "attachments[0].content"),
        ({"attachments": [FILE | {"content": "äGk="}]}, "attachments[0].content"),
        ({"attachments": [FILE | {"content": "\ud800"}]}, "attachments[0].content"),
        ({"attachments": [FILE | {"content": "A" * (34 * 1024 * 1024)}]}, "attachments[0].content"),
    ],
)
def test_a_refusal_names_the_field_of_the_wrong_type_or_form(fields: dict[str, Any], field: str) -> None:
    assert refusal(PLAIN | fields)[0] == field


def test_an_attachment_may_be_empty() -> None:
    assert Email.from_json(PLAIN | {"attachments": [FILE | {"content": ""}]}).attachments[0].content == b""


@pytest.mark.parametrize("name", [*PLAIN, "cc", "headers", "attachments", "tags", "on_uncertain"])
def test_deep_nesting_is_refused_like_any_wrong_type(name: str) -> None:
    nested: object = []
    for _ in range(100_000):
        nested = [nested]

    assert refusal(PLAIN | {name: nested})[0].startswith(name)


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=10)
    | st.sampled_from([*PLAIN.values(), "aGk="]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*PLAIN, "cc", "headers", "attachments", *FILE]) | st.text(max_size=5), inner, max_size=4
        )
    ),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from([*PLAIN, "cc", "headers", "attachments", "tags", "on_uncertain"]), junk) | junk)
@settings(max_examples=250, deadline=None)
def test_any_document_is_an_email_or_refused_with_its_field(document: object) -> None:
    filled = PLAIN | document if isinstance(document, dict) else document
    try:
        email = Email.from_json(filled)
    except InvalidEmail as error:
        # The command line and the log show the field's name and the reason, so the two must be printable.
        assert str(error).isprintable()  # noqa: PT017
    else:
        assert Email.from_json(email.to_json()) == email


def test_an_attachment_decoded_in_pieces_is_complete() -> None:
    content = bytes(range(256)) * 10_000
    file = FILE | {"content": base64.b64encode(content).decode()}

    assert Email.from_json(PLAIN | {"attachments": [file]}).attachments[0].content == content


def test_base64_with_data_after_its_padding_is_refused() -> None:
    for characters in (8, 1 << 20, (1 << 20) + 8):
        content = "A" * (characters - 2) + "==" + "A" * (1 << 20)

        field, reason = refusal(PLAIN | {"attachments": [FILE | {"content": content}]})

        assert (field, reason) == (
            "attachments[0].content",
            "is not valid base64 (RFC 4648, with padding, without line breaks)",
        )


def test_too_many_attachments_are_refused_before_any_is_decoded() -> None:
    assert refusal(PLAIN | {"attachments": [{}] * 101}) == ("attachments", "has more than 100 attachments")
