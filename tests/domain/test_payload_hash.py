"""The payload hash of an email is the same in every release. Emails that a recipient could tell apart have different
hashes."""

from __future__ import annotations

from typing import Any

import pytest

from dispatcher.domain.email import Email
from dispatcher.domain.outgoing import Attachment
from dispatcher.domain.status import OnUncertain

FULL: dict[str, Any] = {
    "message_key": "order-17",
    "sender": "Shop <shop@example.com>",
    "to": ["ann@example.org", "Bob <bob@example.org>"],
    "cc": ["cc@example.org"],
    "bcc": ["bcc@example.org"],
    "reply_to": ["help@example.com"],
    "subject": "Your order — Größe 42",
    "text": "Hello,\nit is on its way.\n",
    "html": "<p>Hello</p>",
    "headers": {"X-Order": "17", "List-Unsubscribe": "<https://example.com/u>"},
    "attachments": [Attachment("receipt.pdf", "application/pdf", b"%PDF-1.7")],
    "tags": ["receipt", "shop"],
    "on_uncertain": OnUncertain.RESEND,
}


def digest(**fields: Any) -> str:
    """The payload hash of a full email with these fields changed."""
    return Email(**(FULL | fields)).payload_hash().hex()


def test_hashes_equal_those_of_the_first_release() -> None:
    # Tables contain such hashes for years. If this test fails, fix the code: with a different hash, an application that
    # repeats an enqueue gets a conflict instead of the email's id.
    plain = Email(message_key="k", sender="a@example.com", to="b@example.org", subject="Hi", text="Hi")

    assert plain.payload_hash().hex() == "15aa8370e85b272ec4e9222bb653fc4034eeb861eee4a80f2b2fde011e4f5845"
    assert digest() == "4748277ee73e1b3ea62c0e147e6dc4e27fb8c1ff08a468dc9ab5ccc41b67968a"


@pytest.mark.parametrize(
    ("field", "beginning"),
    [
        ({"cc": "c@example.org"}, "19ac92c4d28c5caf"),
        ({"bcc": "c@example.org"}, "42c08b25d3b5c881"),
        ({"reply_to": "c@example.org"}, "c08dcd078019e800"),
        ({"headers": {"X-A": "1"}}, "6b2078900ecc8304"),
        ({"attachments": [Attachment("a", "a/b", b"1")]}, "7dba036d8e94fec8"),
        ({"tags": ["a"]}, "74d55879f67e261b"),
        ({"erase_after_sending": True}, "198657cac8f07c7e"),
        ({"lane": "bulk"}, "53c7adc7d44c5ffa"),
    ],
)
def test_an_email_with_one_list_has_the_hash_that_tables_contain(field: dict[str, Any], beginning: str) -> None:
    short = Email(message_key="k", sender="a@example.com", to="b@example.org", subject="Hi", text="Hi", **field)

    assert short.payload_hash().hex()[:16] == beginning


def test_erase_after_sending_and_the_tag_of_earlier_releases_have_the_same_payload_hash() -> None:
    assert digest(erase_after_sending=True) == digest(tags=["receipt", "shop", "one_time_code"])


@pytest.mark.parametrize(
    "same",
    [
        {"message_key": "order-18"},
        {"tenant_id": "acme"},
        {"correlation_id": "request-2"},
        {"headers": {"list-unsubscribe": "<https://example.com/u>", "X-ORDER": "17"}},
        {"on_uncertain": "resend"},
        {"to": ("ann@example.org", "Bob <bob@example.org>")},
    ],
)
def test_fields_that_a_repeat_may_change_do_not_change_the_hash(same: dict[str, Any]) -> None:
    assert digest(**same) == digest()


def test_everything_that_affects_the_recipient_or_the_policy_changes_the_hash() -> None:
    pdf = FULL["attachments"][0]
    changes: list[dict[str, Any]] = [
        {},
        {"sender": "shop@example.com"},
        {"to": ["ann@example.org"]},
        {"to": ["Bob <bob@example.org>", "ann@example.org"]},
        {"cc": []},
        {"bcc": []},
        {"cc": ["bcc@example.org"], "bcc": ["cc@example.org"]},
        {"cc": ["cc@example.org", "bcc@example.org"], "bcc": []},
        {"reply_to": []},
        {"subject": "Your order"},
        {"text": None},
        {"html": None},
        {"text": FULL["html"], "html": FULL["text"]},
        {"headers": {"X-Order": "17"}},
        {"headers": FULL["headers"] | {"X-Order": "18"}},
        {"attachments": []},
        {"attachments": [pdf, pdf]},
        {"attachments": [Attachment("other.pdf", "application/pdf", b"%PDF-1.7")]},
        {"attachments": [Attachment("receipt.pdf", "text/plain", b"%PDF-1.7")]},
        {"attachments": [Attachment("receipt.pdf", "application/pdf", b"%PDF-1.6")]},
        {"tags": ["receipt"]},
        {"on_uncertain": OnUncertain.HOLD},
        {"on_uncertain": None},
        {"erase_after_sending": True},
    ]

    assert len({digest(**change) for change in changes}) == len(changes)


def test_no_text_can_imitate_the_structure_of_the_hashed_form() -> None:
    digests = {
        digest(subject="a", text="b", html=None),
        digest(subject="a1:b", text="x", html=None),
        digest(subject="a", text="1:b", html=None),
        digest(subject="", text="a1:b", html=None),
        digest(tags=["a", "b"]),
        digest(tags=["a1:b"]),
    }

    assert len(digests) == 6
