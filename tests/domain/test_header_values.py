"""Headers that mail software parses contain only ASCII, where no encoded word is allowed."""

from __future__ import annotations

import pytest

from dispatcher.domain.email import Email
from dispatcher.domain.headers import HEADER_KINDS, HeaderKind, header_value_fault
from dispatcher.errors import InvalidEmail


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("List-Unsubscribe", "https://example.com/ü", "not ASCII"),
        ("List-Post", "NO (geschloßen)", "not ASCII"),
        ("List-Help", f"<https://example.com/{'ü' * 151}>", "900 characters"),
        ("list-archive", f"<https://example.com/{'a' * 900}>", "900 characters"),
        ("References", "<1@bücher.example>", "not ASCII"),
        ("In-Reply-To", f"<{'1' * 890}@example.com>", "900 characters"),
        ("List-Unsubscribe-Post", "List-Unsubscribe=One-Clïck", "not ASCII"),
        ("Precedence", "bülk", "not ASCII"),
        ("Auto-Submitted", "auto-generated (für Ann)", "not ASCII"),
        ("List-Id", "Angebote <büro.example.com>", "not ASCII"),
        ("List-Id", "Angebote für Ann", "not ASCII"),
        ("Disposition-Notification-To", "Zoë <zoë@example.com>", "not ASCII"),
        ("Disposition-Notification-To", "Müller, Zoë <zoe@example.com>", "no @"),
    ],
)
def test_a_value_that_no_mail_software_could_read_is_refused_at_enqueue(name: str, value: str, reason: str) -> None:
    with pytest.raises(InvalidEmail, match=reason) as refusal:
        Email(message_key="k", sender="s@example.com", to="a@example.org", text="x", headers={name: value})

    assert refusal.value.field == f"headers.{name}"
    assert not any(word in refusal.value.reason for word in value.split())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("List-Unsubscribe", "<https://mail.example.com/u?next=?a=1>, <mailto:u@example.com?subject=ü>"),
        ("List-Post", "NO"),
        ("References", " ".join(f"<{number}@example.com>" for number in range(50))),
        ("List-Id", '"Angebote für Ann" <offers.example.com>'),
        ("List-Id", "<offers.example.com>"),
        ("Disposition-Notification-To", '"Müller, Zoë" <zoe@bücher.example>, bob@example.org'),
        ("X-Campaign", "Grüße"),
    ],
)
def test_a_value_that_can_be_written_in_ascii_is_accepted(name: str, value: str) -> None:
    assert header_value_fault(name, value) is None


def test_the_names_of_the_table_are_in_lower_case() -> None:
    assert all(name == name.lower() for name in HEADER_KINDS)
    assert set(HEADER_KINDS.values()) == set(HeaderKind)
