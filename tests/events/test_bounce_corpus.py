"""Bounces, reports and replies in the forms of well-known mail servers, each with the right classification.

The files in `bounces/` are written for this test, after what these servers send. `./run test tests/events -k corpus -s`
prints a table of the results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Final
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.domain.bounce_address import BounceAddress
from dispatcher.domain.event import Bounce, EventKind, ProviderEvent
from dispatcher.events.bounce_parser import events_of
from dispatcher.store.address_hashes import normalised

FOLDER: Final = Path(__file__).parent / "bounces"
EMAIL_ID: Final = UUID("0193581f-6c00-7abc-8def-0123456789ab")
ADDRESS: Final = BounceAddress("bounces@example.com", [b"0123456789abcdef0123456789abcdef"])
RECEIVED_AT: Final = datetime(2026, 11, 23, 10, 5, tzinfo=UTC)
ANN: Final = "ann@example.org"
BOB: Final = "bob@example.org"
RIGHT_AT_LEAST: Final = 0.95

ONE: Final[dict[str, str]] = {
    # One recipient, Ann. `soft -`: the event names no recipient.
    "answer-of-a-human": "accepted -",
    "arf-abuse": "complained ann",
    "arf-authentication-failure": "accepted ann",
    "arf-not-spam": "delivered ann",
    "arf-opt-out": "unsubscribed ann",
    "arf-recipient-concealed": "complained ann",
    "att-blocked": "blocked ann",
    "barracuda-reputation": "blocked ann",
    "broken-boundary": "hard ann",
    "challenge-boxbe": "accepted -",
    "challenge-tmda": "accepted -",
    "comcast-not-our-customer": "hard ann",
    "communigate-full": "soft ann",
    "communigate-unknown": "hard ann",
    "contradicting-codes": "blocked ann",
    "courier-over-quota": "soft ann",
    "courier-unknown": "hard ann",
    "deleted-receipt": "accepted -",
    "domino-not-listed": "hard ann",
    "domino-text-only": "hard ann",
    "exchange-2003-unknown": "hard ann",
    "exchange-2007-unknown": "hard ann",
    "exchange-5.5-not-found": "hard ann",
    "exchange-authentication-required": "blocked ann",
    "exchange-delayed": "deferred ann",
    "exchange-expired": "soft ann",
    "exchange-over-quota": "soft ann",
    "exchange-text-only": "hard ann",
    "exchange-too-large": "soft ann",
    "exim-delay-warning": "deferred ann",
    "exim-relay-not-permitted": "blocked ann",
    "exim-retry-timeout": "soft ann",
    "exim-sender-verify": "blocked ann",
    "exim-unrouteable": "hard ann",
    "exim-user-unknown": "hard ann",
    "expanded-list": "delivered ann",
    "gmail-account-disabled": "soft ann",
    "gmail-delivery-incomplete": "deferred ann",
    "gmail-domain-not-found": "hard ann",
    "gmail-inbox-full": "soft ann",
    "gmail-no-such-user": "hard ann",
    "gmail-receiving-rate": "soft ann",
    "gmail-unauthenticated": "blocked ann",
    "gmx-mailbox-unavailable": "soft ann",
    "groupwise-mailbox-full": "soft ann",
    "groupwise-not-found": "hard ann",
    "haraka-unknown": "hard ann",
    "icloud-over-quota": "soft ann",
    "iis-smtp-delay": "deferred ann",
    "iis-smtp-unknown": "hard ann",
    "imail-unknown": "hard ann",
    "internationalized-status": "hard ann",
    "james-unknown": "hard ann",
    "m365-banned-ip": "blocked ann",
    "m365-edge-block": "hard ann",
    "m365-html-only": "hard ann",
    "m365-recipient-not-found": "hard ann",
    "m365-remote-unknown": "hard ann",
    "m365-restricted-sender": "blocked ann",
    "mailenable-unknown": "hard ann",
    "mailru-user-not-found": "hard ann",
    "mdaemon-unknown": "hard ann",
    "messagelabs-block": "blocked ann",
    "mimecast-anti-spoofing": "blocked ann",
    "mimecast-invalid-recipient": "hard ann",
    "opensmtpd-unknown": "hard ann",
    "outlook-block-list": "blocked ann",
    "outlook-mailbox-unavailable": "hard ann",
    "postfix-blocklist": "blocked ann",
    "postfix-delayed": "deferred ann",
    "postfix-delivered": "delivered ann",
    "postfix-expired": "soft ann",
    "postfix-forwarded": "soft ann",  # the address behind the alias does not exist; the alias does
    "postfix-greylisted": "soft ann",
    "postfix-host-not-found": "hard ann",
    "postfix-loop": "soft ann",
    "postfix-mailbox-full": "soft ann",
    "postfix-null-mx": "hard ann",
    "postfix-refused-content": "soft ann",  # `unknown user`, after the server had accepted the user
    "postfix-relayed": "accepted ann",
    "postfix-unverified-recipient": "soft ann",
    "postfix-user-unknown": "hard ann",
    "powermta-bad-mailbox": "hard ann",
    "proofpoint-blocked": "blocked ann",
    "proofpoint-unknown": "hard ann",
    "qmail-badmailfrom": "blocked ann",
    "qmail-no-host": "hard ann",
    "qmail-no-mailbox": "hard ann",
    "qmail-queued-too-long": "soft ann",
    "qmail-quota": "soft ann",
    "qmail-remote-refusal": "hard ann",
    "qmail-simscan-spam": "blocked ann",
    "read-receipt": "accepted -",
    "relay-in-host-name": "hard ann",
    "sendgrid-relay-blocked": "blocked ann",
    "sendgrid-relay-unknown": "hard ann",
    "sendmail-host-unknown": "hard ann",
    "sendmail-local-unknown": "hard ann",
    "sendmail-service-unavailable": "soft ann",
    "sendmail-user-unknown": "hard ann",
    "sendmail-v5": "hard ann",
    "sendmail-warning": "deferred ann",
    "ses-bounce": "hard ann",
    "status-as-text": "hard ann",
    "status-in-base64": "hard ann",
    "status-in-multipart-mixed": "soft ann",
    "status-without-action": "hard ann",
    "unknown-recipient": "soft -",  # the email was not sent to the refused address: no recipient, and never hard
    "vacation-exchange": "accepted -",
    "vacation-gmail": "accepted -",
    "wrong-code-for-full-mailbox": "soft ann",
    "wrong-code-for-policy": "blocked ann",
    "yahoo-deferred-for-days": "soft ann",
    "yahoo-mailbox-disabled": "soft ann",
    "yahoo-no-account": "hard ann",
    "yandex-no-such-user": "hard ann",
    "zimbra-over-quota": "soft ann",
    "zimbra-rejected": "hard ann",
    "zoho-invalid-address": "hard ann",
}
TWO: Final[dict[str, str]] = {
    # Two recipients, Ann and Bob.
    "arf-in-base64": "complained ann",
    "arf-outlook": "complained ann",
    "arf-outlook-copy-only": "complained ann",
    "arf-recipient-in-copy": "complained ann",
    "arf-removal-recipient": "unsubscribed ann",
    "arf-several-recipients": "complained -",
    "exim-two-recipients": "hard ann, soft bob",
    "opensmtpd-two-recipients": "hard ann, soft bob",
    "postfix-two-recipients": "hard ann, soft bob",
    "qmail-two-recipients": "hard ann, soft bob",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A file, what it reports, and what the parser found."""

    name: str
    expected: str
    events: Sequence[ProviderEvent]

    @property
    def found(self) -> str:
        return ", ".join(
            f"{event.bounce or event.kind} {event.recipient.partition('@')[0] if event.recipient else '-'}"
            for event in self.events
        )

    @property
    def is_wrongly_hard(self) -> bool:
        expected = self.expected.split(", ")
        return any(each.startswith("hard") and each not in expected for each in self.found.split(", "))


def octets_of(name: str) -> bytes:
    """A file of the corpus."""
    return (FOLDER / f"{name}.eml").read_bytes()


def rows() -> Iterator[Row]:
    """Each file with its events."""
    for recipients, expected in (((ANN,), ONE), ((ANN, BOB), TWO)):
        for name, words in expected.items():
            yield Row(name, words, events_of(octets_of(name), EMAIL_ID, recipients, RECEIVED_AT))


def test_at_least_95_percent_of_the_corpus_are_classified_right_and_none_wrongly_as_hard() -> None:
    found = list(rows())
    for row in found:
        code = row.events[0].code or "-"
        print(f"{'ok ' if row.found == row.expected else 'NOT'} {row.name:34} {row.found:22} {code:9}", end="")
        print("" if row.found == row.expected else f" expected: {row.expected}")
    right = sum(row.found == row.expected for row in found)
    print(f"{right} of {len(found)} files are classified right ({right / len(found):.1%})")

    assert len(found) >= 60
    assert right / len(found) >= RIGHT_AT_LEAST
    assert [row.name for row in found if row.is_wrongly_hard] == []


@pytest.mark.parametrize(
    "line_ends",
    [["\r\n"], ["\r"], ["\r\r\n"], ["\r\n", "\n"], ["\n", "\r\n", "\n"], ["\r\n", "\r\n", "\n"], ["\r\r\n", "\n"]],
)
def test_the_line_ends_of_a_message_change_no_event(line_ends: list[str]) -> None:
    changed = []
    for row in rows():
        ends = cycle(end.encode() for end in line_ends)
        octets = b"".join(line + next(ends) for line in octets_of(row.name).split(b"\n"))
        recipients = (ANN,) if row.name in ONE else (ANN, BOB)
        if events_of(octets, EMAIL_ID, recipients, RECEIVED_AT) != row.events:
            changed.append(row.name)

    assert changed == []


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("rfc822; ann+2Bnews@example.org", "ann+news@example.org"),
        ("rfc822; ann+2bnews@example.org", "ann+news@example.org"),
        ("rfc822; ann+2Bnews@example.org", "ann+2Bnews@example.org"),
        ("rfc822; ann+news@example.org", "ann+news@example.org"),
        ("rfc822; ann+ee@example.org", "ann+ee@example.org"),
        ("rfc822; <ann+3Dx+2Bnews@example.org>", "ann=x+news@example.org"),
        (r"utf-8; j\x{F6}rg@example.org", "jörg@example.org"),
        (r"utf-8; j\x{00F6}rg\x{2B}news@example.org", "jörg+news@example.org"),
        (r"utf-8; \x{1F600}@example.org", "\N{GRINNING FACE}@example.org"),
        ("utf-8; j+C3+B6rg@example.org", "jörg@example.org"),
        ("utf-8; jörg@example.org", "jörg@example.org"),
        ("utf-8; jörg@müller.example", "jörg@xn--mller-kva.example"),
        (r"utf-8; \x{D800}\x{110000}\x{FFFFFFFF}@example.org", None),
    ],
)
@pytest.mark.parametrize("field", ["Original-Recipient", "Final-Recipient"])
@pytest.mark.parametrize("part", ["delivery-status", "global-delivery-status"])
def test_an_encoded_address_is_decoded_and_then_compared(
    written: str, address: str | None, field: str, part: str
) -> None:
    octets = octets_of("postfix-user-unknown").replace(b"message/delivery-status", f"message/{part}".encode())
    octets = b"\n".join(
        line for line in octets.split(b"\n") if not line.startswith((b"Original-Recipient:", b"Final-Recipient:"))
    ).replace(b"Action: failed", f"{field}: {written}\nAction: failed".encode())

    (event,) = events_of(octets, EMAIL_ID, (address or ANN,), RECEIVED_AT)

    expected = (Bounce.HARD, normalised(address)) if address else (Bounce.SOFT, None)
    assert (event.bounce, event.recipient) == expected


@pytest.mark.parametrize(
    "sender",
    [
        "Microsoft Exchange \u2039MicrosoftExchange329e@example.org\u203a <system@example.org>",
        "MicrosoftExchange329e71ec88ae4615bbc36ab6ce41109e@example.org",
        "Microsoft Outlook <MicrosoftExchange329e71ec@example.org>",
        "Exchange Server <system@example.org>",
        "Mail Server <system@example.org>",
        "Mail Gateway <system@example.org>",
        "Maildaemon <system@example.org>",
        "SMTP Gateway <system@example.org>",
        "SMTP Server <system@example.org>",
        "Delivery Status Notification <system@example.org>",
        "Delivery Notification <system@example.org>",
        "bounce@example.org",
        "ndr@example.org",
        "<>",
    ],
)
def test_a_text_from_a_server_is_a_bounce_whatever_the_server_calls_itself(sender: str) -> None:
    octets = octets_of("domino-text-only").replace(b"From: postmaster@example.org", f"From: {sender}".encode())

    (event,) = events_of(octets, EMAIL_ID, (ANN,), RECEIVED_AT)

    assert (event.bounce, event.recipient) == (Bounce.HARD, ANN)


@pytest.mark.parametrize(
    "sender", ["Ann <ann@example.org>", "Outlook Ann <ann@example.org>", "The Notifier <a@example.org>"]
)
def test_a_text_from_a_person_is_no_bounce(sender: str) -> None:
    octets = octets_of("domino-text-only").replace(b"From: postmaster@example.org", f"From: {sender}".encode())

    (event,) = events_of(octets, EMAIL_ID, (ANN,), RECEIVED_AT)

    assert (event.kind, event.recipient) == (EventKind.ACCEPTED, None)


def test_every_file_of_the_corpus_has_an_expectation_and_the_token_of_its_email() -> None:
    names = {path.stem for path in FOLDER.glob("*.eml")}

    assert names == ONE.keys() | TWO.keys()
    assert {ADDRESS.find(octets_of(name).decode("latin-1")) for name in names} == {EMAIL_ID}


def test_replies_challenges_receipts_and_delays_are_no_bounces() -> None:
    kinds = {row.name: {event.kind for event in row.events} for row in rows() if not row.expected.startswith("hard")}
    prefixes = ("vacation", "challenge", "answer", "read-", "deleted-")

    assert all(kinds[name] == {EventKind.ACCEPTED} for name in kinds if name.startswith(prefixes))
    assert all(kinds[name] == {EventKind.DEFERRED} for name in kinds if "delay" in name or "warning" in name)


def test_no_event_repeats_an_address_or_the_name_of_a_mailbox() -> None:
    details = [(row.name, event.detail or "") for row in rows() for event in row.events]

    assert [name for name, detail in details if "@" in detail or "ann" in detail.lower().split()] == []


@pytest.mark.parametrize("named", ["joann@example.org", "ann@example.org.uk", "x.ann@example.org", "ann@example.orgs"])
def test_a_longer_address_in_a_text_is_not_the_recipient(named: str) -> None:
    octets = octets_of("qmail-no-mailbox").replace(b"<ann@example.org>:", f"<{named}>:".encode())

    (event,) = events_of(octets, EMAIL_ID, (ANN,), RECEIVED_AT)

    assert (event.bounce, event.recipient) == (Bounce.SOFT, None)


def test_a_reason_that_is_not_about_the_recipient_makes_no_hard_bounce() -> None:
    octets = octets_of("exim-two-recipients").replace(b"bob@example.org", b"eve@example.org")

    events = events_of(octets, EMAIL_ID, (ANN, "eve@example.org", BOB), RECEIVED_AT)

    assert {event.recipient: event.bounce for event in events} == {ANN: Bounce.HARD, "eve@example.org": Bounce.SOFT}


@pytest.mark.parametrize("date", ["", "yesterday", "31 Dec 9999 23:59:59 -2359", "01 Jan 2001 00:00:00 +0000"])
def test_an_implausible_date_is_replaced_by_the_time_of_receipt(date: str) -> None:
    octets = octets_of("qmail-no-mailbox").replace(b"Date: Mon, 23 Nov 2026 10:00:00 +0000", f"Date: {date}".encode())

    (event,) = events_of(octets, EMAIL_ID, (ANN,), RECEIVED_AT)

    assert event.happened_at == RECEIVED_AT


@given(st.binary(max_size=2000), st.sampled_from(sorted(ONE)))
def test_damaged_messages_never_become_hard_bounces_of_other_addresses(noise: bytes, name: str) -> None:
    octets = octets_of(name)
    middle = len(octets) // 2

    events = events_of(octets[:middle] + noise + octets[middle:], EMAIL_ID, (BOB,), RECEIVED_AT)

    assert events
    assert all(event.bounce is not Bounce.HARD and event.recipient in (None, BOB) for event in events)
