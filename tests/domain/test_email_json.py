"""An email is unchanged after conversion to JSON and back, and its payload hash is the same in every release."""

from __future__ import annotations

import base64
import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.domain.email import Email
from dispatcher.domain.mistakes import MAX_MISTAKES, all_mistakes
from dispatcher.domain.outgoing import Attachment
from dispatcher.domain.sms import message_from_json
from dispatcher.domain.status import OnUncertain
from dispatcher.errors import InvalidEmail

PLAIN = {"message_key": "k", "from": "shop@example.com", "to": ["ann@example.org"], "subject": "Hi", "text": "Hi"}
PDF = Attachment("receipt.pdf", "application/pdf", b"%PDF-1.7")
FILE: dict[str, Any] = {"filename": "a.txt", "content_type": "text/plain", "content": "aGk="}


def refusal(document: object) -> tuple[str, str]:
    with pytest.raises(InvalidEmail) as caught:
        Email.from_json(document)
    return caught.value.field, caught.value.reason


FULL_DOCUMENT: dict[str, Any] = {
    "message_key": "order-17",
    "tenant_id": "acme",
    "from": "Shop <shop@example.com>",
    "to": ["ann@example.org", "Bob <bob@example.org>"],
    "cc": ["cc@example.org"],
    "bcc": ["bcc@example.org"],
    "reply_to": ["help@example.com"],
    "subject": "Your order — Größe 42",
    "text": "Hello,\nit is on its way.\n",
    "html": "<p>Hello</p>",
    "headers": {"X-Order": "17", "List-Unsubscribe": "<https://example.com/u>"},
    "attachments": [{"filename": "receipt.pdf", "content_type": "application/pdf", "content": "JVBERi0xLjc="}],
    "tags": ["receipt", "shop"],
    "metadata": {"order": "17"},
    "topic": "newsletter",
    "correlation_id": "request-1",
    "on_uncertain": "resend",
    "erase_after_sending": True,
    "send_at": "2026-11-21T10:00:00Z",
    "expires_at": "2026-11-21T10:00:00.500000Z",
    "lane": "urgent",
}
LATER = ("tenant_id", "correlation_id", "erase_after_sending", "send_at", "expires_at", "lane", "metadata", "topic")
FULL: dict[str, Any] = {name: value for name, value in FULL_DOCUMENT.items() if name not in ("from", *LATER)}
FULL |= {"sender": FULL_DOCUMENT["from"], "attachments": [PDF], "on_uncertain": OnUncertain.RESEND}
"""The arguments for the same email, without some fields."""


def test_every_field_has_its_json_name() -> None:
    email = Email.from_json(FULL_DOCUMENT)

    send_at = datetime(2026, 11, 21, 10, tzinfo=UTC)
    times = {"send_at": send_at, "expires_at": send_at + timedelta(seconds=0.5)}
    assert email == Email(**FULL | {name: FULL_DOCUMENT[name] for name in LATER} | times)
    assert email.to_json() == FULL_DOCUMENT


def test_a_single_address_needs_no_list_and_null_counts_as_absent() -> None:
    present = {**dict.fromkeys(FULL_DOCUMENT), **PLAIN, "to": "ann@example.org"}
    before = json.dumps(present)

    assert Email.from_json(present) == Email.from_json(PLAIN)
    assert json.dumps(present) == before, "the document is not changed"


def test_an_email_with_only_bcc_recipients_needs_no_to() -> None:
    document = {name: value for name, value in PLAIN.items() if name != "to"}

    assert Email.from_json(document | {"bcc": ["ann@example.org"]}).to == ()
    assert refusal(document) == ("to", "has no recipient; give at least one in to, cc or bcc")


@pytest.mark.parametrize("name", ["message_key", "from", "subject"])
def test_a_refusal_names_the_missing_field(name: str) -> None:
    reason = "is required unless template_id is set" if name == "subject" else "is required"

    assert refusal({key: value for key, value in PLAIN.items() if key != name}) == (name, reason)
    assert refusal(PLAIN | {name: None}) == (name, reason)


UNKNOWN = f"is unknown; allowed: {', '.join(Email.by_json_name)}"


@pytest.mark.parametrize(
    ("document", "field", "reason"),
    [
        *((wrong, "email", "must be a JSON object") for wrong in (None, [], "email", 17, [PLAIN], b"{}")),
        ({**PLAIN, "\u202e\ud800" + "x" * 1_000_000: 1}, "??" + "x" * 38 + "…", UNKNOWN),
        ({**PLAIN, "sender": "a@example.com"}, "sender", "is unknown; did you mean from?"),
        ({**PLAIN, "replyTo": "a@example.com"}, "replyTo", "is unknown; did you mean reply_to?"),
        ({**PLAIN, "Subject": "Hello"}, "Subject", "is unknown; did you mean subject?"),
        ({**PLAIN, "attachments": [{}] * 101}, "attachments", "has more than 100 attachments"),  # decodes none
    ],
)
def test_a_refusal_has_a_reason(document: object, field: str, reason: str) -> None:
    assert refusal(document) == (field, reason)


REFUSED: dict[str, tuple[Any, ...]] = {
    "from": (["shop@example.com"], {"email": "shop@example.com"}),
    "attachments": (FILE, "a.txt", [FILE] * 101),
    "attachments[0]": (["a.txt"],),
    "attachments[1].type": ([FILE, FILE | {"type": "text/plain"}],),
    "attachments[0].content_type": (
        *([{"filename": "a", "content": ""}], [FILE | {"content_type": "text"}], [FILE | {"content_type": []}]),
    ),
    "attachments[0].filename": ([FILE | {"filename": None}], [FILE | {"filename": 1}]),
    "attachments[1].filename": ([FILE, FILE | {"filename": "../a"}],),
}


@pytest.mark.parametrize(("field", "wrong"), [(field, wrong) for field, values in REFUSED.items() for wrong in values])
def test_a_refusal_names_the_field_by_its_json_name(field: str, wrong: object) -> None:
    assert refusal(PLAIN | {re.split(r"\W", field)[0]: wrong})[0] == field


@pytest.mark.parametrize(
    "content",
    [
        *(1, "aGk", "aGk==", "aGk=\n", "a G k =", "aG-_", "=aGk", "aGk=aGk=", "äGk=", "\ud800", "aGk=" * 300_000),
        *("aGlp" * 300_000 + "aGk", "A" * (34 * 1024 * 1024)),
        *("A" * (each - 2) + "==" + "A" * (1 << 20) for each in (8, 1 << 20, (1 << 20) + 8)),  # data after the padding
    ],
)
def test_content_that_is_not_base64_or_too_long_is_refused(content: object) -> None:
    assert refusal(PLAIN | {"attachments": [FILE | {"content": content}]})[0] == "attachments[0].content"


@pytest.mark.parametrize(
    ("text", "instant"),
    [
        ("2026-12-24T18:00:00+01:00", datetime(2026, 12, 24, 17, tzinfo=UTC)),
        ("2026-12-24t17:00:00.5z", datetime(2026, 12, 24, 17, 0, 0, 500_000, tzinfo=UTC)),
    ],
)
def test_json_has_times_as_rfc_3339(text: str, instant: datetime) -> None:
    made = Email.from_json(PLAIN | {"send_at": text})

    assert made.send_at == instant
    assert Email.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    "text", ["2026-12-24T18:00:00", "2026-12-24", "soon", "", 1_800_000_000, "2026-13-01T00:00:00Z", "20261224T180000Z"]
)
def test_a_time_without_a_zone_or_in_another_form_is_refused(text: object) -> None:
    with pytest.raises(InvalidEmail, match="zone") as caught:
        Email.from_json(PLAIN | {"expires_at": text})

    assert caught.value.field == "expires_at"


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10)
fields = st.sampled_from([*PLAIN, "cc", "headers", "attachments", *FILE]) | st.text(max_size=5)
junk = st.recursive(
    leaves | st.sampled_from([*PLAIN.values(), "aGk="]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(fields, inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from([*PLAIN, "cc", "headers", "attachments", "tags", "on_uncertain"]), junk) | junk)
@settings(max_examples=60)
def test_any_document_is_an_email_or_refused_with_its_field(document: object) -> None:
    filled = PLAIN | document if isinstance(document, dict) else document
    try:
        email = Email.from_json(filled)
    except InvalidEmail as error:
        # The command line and the log show the field's name and the reason, so the two must be printable.
        assert str(error).isprintable()  # noqa: PT017
    else:
        assert Email.from_json(email.to_json()) == email


@pytest.mark.parametrize("content", [b"", bytes(range(256)) * 10_000], ids=["empty", "decoded in pieces"])
def test_an_attachment_is_decoded(content: bytes) -> None:
    file = FILE | {"content": base64.b64encode(content).decode()}

    assert Email.from_json(PLAIN | {"attachments": [file]}).attachments[0].content == content


def digest(**fields: Any) -> str:
    return Email(**(FULL | fields)).payload_hash().hex()


@pytest.mark.parametrize(
    ("fields", "beginning"),
    [
        (FULL, "4748277ee73e1b3e"),
        ({}, "15aa8370e85b272e"),
        ({"cc": "c@example.org"}, "19ac92c4d28c5caf"),
        ({"bcc": "c@example.org"}, "42c08b25d3b5c881"),
        ({"reply_to": "c@example.org"}, "c08dcd078019e800"),
        ({"headers": {"X-A": "1"}}, "6b2078900ecc8304"),
        ({"attachments": [Attachment("a", "a/b", b"1")]}, "7dba036d8e94fec8"),
        ({"tags": ["a"]}, "74d55879f67e261b"),
        ({"erase_after_sending": True}, "198657cac8f07c7e"),
        ({"lane": "bulk"}, "53c7adc7d44c5ffa"),
        ({"metadata": {}}, "15aa8370e85b272e"),
    ],
)
def test_hashes_equal_those_of_the_first_release(fields: dict[str, Any], beginning: str) -> None:
    # Tables contain such hashes for years. If this test fails, fix the code: with a different hash, an application that
    # repeats an enqueue gets a conflict instead of the email's id.
    short = {"message_key": "k", "sender": "a@example.com", "to": "b@example.org", "subject": "Hi", "text": "Hi"}

    assert Email(**{**short, **fields}).payload_hash().hex()[:16] == beginning


DATA = {"a": 1, "b": {"c": 2, "d": 3}}
TEMPLATE: dict[str, Any] = {"subject": "", "text": None, "html": None, "template_id": "d-1", "template_data": DATA}


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({}, {"message_key": "order-18"}),
        ({}, {"tenant_id": "acme"}),
        ({}, {"correlation_id": "request-2"}),
        ({}, {"headers": {"list-unsubscribe": "<https://example.com/u>", "X-ORDER": "17"}}),
        ({}, {"on_uncertain": "resend"}),
        ({}, {"to": ("ann@example.org", "Bob <bob@example.org>")}),
        ({"erase_after_sending": True}, {"tags": ["receipt", "shop", "one_time_code"]}),  # the tag of earlier releases
        ({"metadata": {"a": "1", "b": "2"}}, {"metadata": {"b": "2", "a": "1"}}),
        (TEMPLATE, {"template_data": {"b": {"d": 3, "c": 2}, "a": 1}}),
    ],
)
def test_fields_that_a_repeat_may_change_do_not_change_the_hash(fields: dict[str, Any], same: dict[str, Any]) -> None:
    assert digest(**fields) == digest(**(TEMPLATE if fields is TEMPLATE else {}) | same)


def test_everything_that_affects_the_recipient_or_the_policy_changes_the_hash() -> None:
    later = datetime.now(UTC) + timedelta(days=3)
    changes: list[dict[str, Any]] = [
        {},
        {"sender": "shop@example.com"},
        *({"to": to} for to in (["ann@example.org"], ["Bob <bob@example.org>", "ann@example.org"])),
        *({name: []} for name in ("cc", "bcc", "reply_to", "attachments")),
        {"cc": ["bcc@example.org"], "bcc": ["cc@example.org"]},
        {"cc": ["cc@example.org", "bcc@example.org"], "bcc": []},
        {"subject": "Your order"},
        *({name: None} for name in ("text", "html", "on_uncertain")),
        {"text": FULL["html"], "html": FULL["text"]},
        *({"headers": headers} for headers in ({"X-Order": "17"}, FULL["headers"] | {"X-Order": "18"})),
        {"attachments": [PDF, PDF]},
        {"attachments": [Attachment("other.pdf", "application/pdf", b"%PDF-1.7")]},
        {"attachments": [Attachment("receipt.pdf", "text/plain", b"%PDF-1.7")]},
        {"attachments": [Attachment("receipt.pdf", "application/pdf", b"%PDF-1.6")]},
        # No text imitates the structure of the hashed form.
        *({"tags": tags} for tags in (["receipt"], ["a", "b"], ["a1:b"])),
        *({"subject": one, "text": two} for one, two in (("a", "b"), ("a", "1:b"), ("a1:b", "x"), ("", "a1:b"))),
        {"on_uncertain": OnUncertain.HOLD},
        {"erase_after_sending": True},
        *({"send_at": later} | more for more in ({}, {"expires_at": later + timedelta(hours=1)})),
        {"expires_at": later},
        {"lane": "bulk"},
        *({"metadata": {"a": text}} for text in ("1", "2")),
        {"metadata": {"b": "1"}},
        *({"topic": topic} for topic in ("news", "offers")),
        *(TEMPLATE | more for more in ({}, {"template_id": "d-2"}, {"template_data": {"name": "Bob"}})),
    ]

    assert len({digest(**change) for change in changes}) == len(changes)


ALL_MISTAKES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "every field, every entry of a list, every header and every unknown field": (
        PLAIN
        | {"from": "nobody", "to": ["ann@example.org", "ann", 7], "subject": 7}
        | {"attachments": [FILE, FILE | {"content": "!"}, {}], "headers": {"X-A": "a\nb", "X-B": "b", "To": "c"}}
        | {"lane": "Urgent!", "send_at": "now", "replyTo": "a@example.com", "a.b": 1},
        [
            *("from", "to[1]", "to[2]", "subject", "attachments[1].content", "attachments[2].filename"),
            *("headers.X-A", "headers.To", "lane", "send_at", "replyTo", "a.b"),
        ],
    ),
    "what is missing": ({}, ["message_key", "from", "to", "text", "subject"]),
    "a wrong body is not missing": (PLAIN | {"text": 7, "tags": ["", "a"]}, ["text", "tags[0]"]),
    "fields that do not fit together": (
        {"message_key": "", "from": "a@example.com", "to": [], "template_id": "d-1", "html": "<p>"}
        | {"send_at": "2026-12-24T18:00:00Z", "expires_at": "2026-12-23T18:00:00Z"},
        ["message_key", "expires_at", "to", "template_id"],
    ),
    "a mistake of many recipients": (PLAIN | {"to": ["a@example.com"] * 600, "cc": ["b@example.com"] * 600}, ["to"]),
    "an SMS": ({"channel": "sms", "to": ["1", "2"], "subject": "Hi"}, ["to", "subject", "message_key", "text"]),
}


@pytest.mark.parametrize("case", ALL_MISTAKES)
def test_all_mistakes_are_found_at_once(case: str) -> None:
    document, fields = ALL_MISTAKES[case]
    with pytest.raises(InvalidEmail) as caught:
        message_from_json(document)

    assert [each.field for each in all_mistakes(document, caught.value)] == fields


def test_the_number_of_mistakes_is_limited() -> None:
    found = all_mistakes({"to": ["ann"] * 1000, "from": "ann"}, InvalidEmail("to[0]", "is wrong"))

    assert len(found) == MAX_MISTAKES
