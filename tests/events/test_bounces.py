"""What servers return to the envelope sender is classified right, and doubt never makes a bounce hard. One message
takes at most 100 ms of CPU, whatever it contains and whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from itertools import cycle
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.domain.event import OF_TOPIC, Bounce, ProviderEvent
from dispatcher.events.bounce_class import ENHANCED, classify
from dispatcher.events.bounce_parser import MAX_RECIPIENTS, MAX_UNKNOWN_RECIPIENTS, events_of
from dispatcher.events.maildir import MAX_OCTETS
from dispatcher.store.address_hashes import normalised
from tests.cpu import takes_cpu
from tests.events.corpus import ADDRESS, BOB, EMAIL_ID, EVENTS, OCTETS
from tests.events.requests import ANN

NOW: Final = datetime(2026, 11, 23, 10, 5, tzinfo=UTC)
NOT_YET: Final = {"yandex-no-such-user": "blocked ann"}
"""What the parser finds in the messages that it classifies wrong."""


def read(octets: bytes, *recipients: str) -> list[ProviderEvent]:
    return events_of(octets, EMAIL_ID, recipients or (ANN,), NOW)


def recipients_of(octets: bytes) -> tuple[str, ...]:
    return (ANN, BOB) if BOB.encode() in octets else (ANN,)


@cache
def events_in(name: str) -> list[ProviderEvent]:
    return read(OCTETS[name], *recipients_of(OCTETS[name]))


def words(events: list[ProviderEvent]) -> str:
    """The class and the recipient of each event: `hard ann, soft bob`, `unsubscribed ann group`."""
    return ", ".join(
        f"{each.bounce or each.kind} {(each.recipient or '-').partition('@')[0]}"
        + (f" {each.code}" if each.code == OF_TOPIC else "")
        for each in events
    )


def test_all_messages_of_the_corpus_but_one_are_classified_right_and_name_their_email() -> None:
    found = {name: words(events_in(name)) for name in OCTETS}

    assert found == {**EVENTS, **NOT_YET}
    assert {ADDRESS.find(octets.decode("latin-1")) for octets in OCTETS.values()} == {EMAIL_ID}


def test_no_event_repeats_an_address_or_the_name_of_a_mailbox() -> None:
    details = [(name, event.detail or "") for name in OCTETS for event in events_in(name)]

    assert [name for name, detail in details if "@" in detail or "ann" in detail.lower().split()] == []


@pytest.mark.parametrize(
    "line_ends",
    [["\r\n"], ["\r"], ["\r\r\n"], ["\r\n", "\n"], ["\n", "\r\n", "\n"], ["\r\n", "\r\n", "\n"], ["\r\r\n", "\n"]],
)
def test_the_line_ends_of_a_message_change_no_event(line_ends: list[str]) -> None:
    changed = []
    for name, octets in OCTETS.items():
        ends = cycle(end.encode() for end in line_ends)
        changed_octets = b"".join(line + next(ends) for line in octets.split(b"\n"))
        if read(changed_octets, *recipients_of(octets)) != events_in(name):
            changed.append(name)

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
def test_an_encoded_address_is_decoded_and_compared(written: str, address: str | None, field: str, part: str) -> None:
    octets = OCTETS["postfix-user-unknown"].replace(b"message/delivery-status", f"message/{part}".encode())
    octets = b"\n".join(
        line for line in octets.split(b"\n") if not line.startswith((b"Original-Recipient:", b"Final-Recipient:"))
    ).replace(b"Action: failed", f"{field}: {written}\nAction: failed".encode())

    (event,) = read(octets, address or ANN)

    expected = (Bounce.HARD, normalised(address)) if address else (Bounce.SOFT, None)
    assert (event.bounce, event.recipient) == expected


SERVERS: Final = [
    "Microsoft Exchange \u2039MicrosoftExchange329e@example.org\u203a <system@example.org>",
    "MicrosoftExchange329e71ec88ae4615bbc36ab6ce41109e@example.org",
    "Microsoft Outlook <MicrosoftExchange329e71ec@example.org>", "Exchange Server <system@example.org>",
    "Mail Server <system@example.org>", "Mail Gateway <system@example.org>", "Maildaemon <system@example.org>",
    "SMTP Gateway <system@example.org>", "SMTP Server <system@example.org>", "bounce@example.org", "ndr@example.org",
    "Delivery Status Notification <system@example.org>", "Delivery Notification <system@example.org>", "<>",
]  # fmt: skip
PERSONS: Final = ["Ann <ann@example.org>", "Outlook Ann <ann@example.org>", "The Notifier <a@example.org>"]


@pytest.mark.parametrize("sender", SERVERS + PERSONS)
def test_a_text_from_a_server_is_a_bounce_and_a_text_from_a_person_is_not(sender: str) -> None:
    octets = OCTETS["domino-text-only"].replace(b"From: postmaster@example.org", f"From: {sender}".encode())

    assert words(read(octets)) == ("hard ann" if sender in SERVERS else "accepted -")


@pytest.mark.parametrize("named", ["joann@example.org", "ann@example.org.uk", "x.ann@example.org", "ann@example.orgs"])
def test_a_longer_address_in_a_text_is_not_the_recipient(named: str) -> None:
    octets = OCTETS["qmail-no-mailbox"].replace(b"<ann@example.org>:", f"<{named}>:".encode())

    assert words(read(octets)) == "soft -"


def test_a_reason_that_is_not_about_the_recipient_makes_no_hard_bounce() -> None:
    octets = OCTETS["exim-two-recipients"].replace(b"bob@example.org", b"eve@example.org")

    assert words(read(octets, ANN, "eve@example.org", BOB)) == "hard ann, soft eve"


@pytest.mark.parametrize("date", ["", "yesterday", "31 Dec 9999 23:59:59 -2359", "01 Jan 2001 00:00:00 +0000"])
def test_an_implausible_date_is_replaced_by_the_time_of_receipt(date: str) -> None:
    octets = OCTETS["qmail-no-mailbox"].replace(b"Date: Mon, 23 Nov 2026 10:00:00 +0000", f"Date: {date}".encode())

    assert [event.happened_at for event in read(octets)] == [NOW]


@given(st.binary(max_size=2000), st.sampled_from([octets for octets in OCTETS.values() if BOB.encode() not in octets]))
def test_damaged_messages_never_become_hard_bounces_of_other_addresses(noise: bytes, octets: bytes) -> None:
    middle = len(octets) // 2

    events = read(octets[:middle] + noise + octets[middle:], BOB)

    assert events
    assert all(event.bounce is not Bounce.HARD and event.recipient in (None, BOB) for event in events)


@pytest.mark.parametrize(
    ("status", "words", "bounce"),
    [
        ("5.1.1", "", Bounce.HARD),
        ("5.1.10", "", Bounce.HARD),
        ("5.0.0", "550 User unknown", Bounce.HARD),
        (None, "550 No such user here", Bounce.HARD),
        ("5.0.0", "450 User unknown", Bounce.SOFT),
        ("4.1.1", "User unknown", Bounce.SOFT),
        ("5.1.1", "451 4.3.0 User unknown", Bounce.SOFT),
        ("5.1.1", "The mailbox of this user is full", Bounce.SOFT),
        ("5.1.1", "Temporary lookup failure", Bounce.SOFT),
        ("5.2.1", "The account is disabled", Bounce.SOFT),
        ("5.2.2", "", Bounce.SOFT),
        ("5.3.4", "", Bounce.SOFT),
        ("5.5.0", "550 no", Bounce.SOFT),
        ("5.9.9", "", Bounce.SOFT),
        (None, "", Bounce.SOFT),
        ("5.7.1", "550 5.1.1 User unknown", Bounce.BLOCKED),
        ("5.1.1", "550 Blocked by our policy", Bounce.BLOCKED),
        ("5.1.8", "Domain of sender address does not resolve", Bounce.BLOCKED),
        ("5.0.0", "550 Sender verify failed: no such user", Bounce.BLOCKED),
        ("5.1.1", "host relay.blocklist.example.org said: 550 5.1.1 User unknown", Bounce.HARD),
    ],
)
def test_the_class_follows_from_code_and_words(status: str | None, words: str, bounce: Bounce) -> None:
    assert classify(status, words) is bounce


def test_an_unknown_user_after_the_content_is_no_hard_bounce() -> None:
    assert classify("5.0.0", "550 User unknown", after_data=True) is Bounce.SOFT
    assert classify("5.1.1", "550 5.1.1 User unknown", after_data=True) is Bounce.HARD  # the code leaves no doubt


@pytest.mark.parametrize("words", ["5.1.1.7", "15.1.1", "host 192.5.1.1", "Exchange 5.1.2600", "8.12.3"])
def test_addresses_and_versions_are_no_status_codes(words: str) -> None:
    assert ENHANCED.findall(words) == []


CROWD: Final = (ANN, *(f"user{number}@example.org" for number in range(MAX_RECIPIENTS - 1)))
HEAD: Final = "From: MAILER-DAEMON@mx.example.net\nSubject: Undelivered Mail\n"
TEXT: Final = f"{HEAD}\n"
HTML: Final = f"{HEAD}Content-Type: text/html\n\n"
REPORT: Final = f"{HEAD}Content-Type: multipart/report; boundary=B\n\n--B\n\n"
STATUS: Final = "\n--B\nContent-Type: message/delivery-status\n\n"
GLOBAL: Final = "\n--B\nContent-Type: message/global-delivery-status\n\n"
FEEDBACK: Final = f"{REPORT}\n--B\nContent-Type: message/feedback-report\n\nFeedback-Type: abuse\n"
COPY: Final = f"{REPORT}\n--B\nContent-Type: message/feedback-report\n\n\n--B\nContent-Type: message/rfc822\n\n"
ANN_FAILED: Final = f"Final-Recipient: rfc822; {ANN}\nAction: failed\n\n"
NESTED: Final = HEAD + "".join(f"Content-Type: multipart/mixed; boundary={n}\n\n--{n}\n" for n in range(29))


def _of_crowd(form: str) -> str:
    return "".join(form.format(address) for address in CROWD)


SHAPES: Final[Mapping[str, tuple[str, str]]] = {
    # What a message begins with, and what is repeated until the message has the size that the monitor reads.
    "blocks": (REPORT + STATUS, ANN_FAILED),
    "blocks after a text about the recipient": (REPORT + f"<{ANN}> is here\n" * 400 + STATUS, ANN_FAILED),
    "blocks of a crowd after a text about it": (
        REPORT + _of_crowd("{} mailbox address message\n")[:9000] + STATUS,
        _of_crowd("Final-Recipient: rfc822; {}\nAction: failed\n\n"),
    ),
    "blocks with long reasons": (REPORT + STATUS, ANN_FAILED[:-1] + f"Diagnostic-Code: smtp; {'mailbox ' * 1000}\n\n"),
    "blocks with many codes": (REPORT + STATUS, ANN_FAILED[:-1] + f"Diagnostic-Code: smtp; {'5.4.1 ' * 1000}\n\n"),
    "blocks of one field": (REPORT + STATUS, "Action: f\n\n"),
    "blocks in UTF-8": (REPORT + GLOBAL, "Final-Recipient: utf-8; jörg@müller.example\nAction: failed\n\n"),
    "blocks as text": (TEXT, ANN_FAILED),
    "blocks in many text parts": (REPORT, f"--B\n\n{ANN_FAILED}"),
    "parts": (REPORT, "--B\n\n"),
    "nested parts": (NESTED, "x\n"),
    "text about a recipient": (TEXT, f"<{ANN}>:\n550 mailbox \n\n"),
    "text about a crowd": (TEXT, _of_crowd("<{}>: mailbox address message")),
    "text with almost-matching words": (TEXT, "mailbox address message account 5.4.1 sender "),
    "text in UTF-8": (f"{HEAD}Content-Type: text/plain; charset=utf-8\n\n", "jörg@müller.example\n"),
    "quoted text": (TEXT, "> > > >\n"),
    "one long line": (TEXT, "a"),
    "one long line of dashes": (TEXT, "- "),
    "digits": (TEXT, "1."),
    "blank lines": (TEXT, "\n"),
    "short paragraphs": (TEXT, "x\n\n"),
    "tags": (HTML, "<"),
    "line breaks": (HTML, "<br "),
    "fields": (HEAD, "X-A: b\n"),
    "a folded field": (HEAD, " b\n"),
    "an encoded subject": ("From: MAILER-DAEMON\nSubject: ", "=?utf-8?q?a?= "),
    "a long date": ("Date: ", "1 "),
    "failed recipients": ("X-Failed-Recipients: ", f"{ANN}, "),
    "parameters": (f"{HEAD}Content-Type: text/plain", ";a=b"),
    "parts of a boundary": (f"{HEAD}Content-Type: multipart/mixed", '; boundar*1*="b"'),
    "recipients of a complaint": (FEEDBACK, f"Original-Rcpt-To: {ANN}\n"),
    "recipients in xtext": (FEEDBACK, "Original-Rcpt-To: a" + "+2B" * 300 + "@example.org\n"),
    "mailboxes of a copy": (COPY, f"Delivered-To: {ANN}\n"),
}


@pytest.mark.parametrize("recipients", [(), CROWD], ids=["unknown", "crowd"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_hostile_message_takes_little_cpu_time(shape: str, recipients: tuple[str, ...]) -> None:
    beginning, repeated = (part.encode() for part in SHAPES[shape])
    octets = (beginning + repeated * (MAX_OCTETS // len(repeated) + 1))[:MAX_OCTETS]

    def parse() -> None:
        with suppress(ValueError):  # the message is refused
            events_of(octets, EMAIL_ID, recipients, NOW)

    assert takes_cpu(parse, at_most=0.1)


@pytest.mark.parametrize(("recipients", "most"), [((), MAX_UNKNOWN_RECIPIENTS), ((ANN,), 1), (CROWD[:7], 7)])
def test_a_report_has_at_most_one_event_for_each_recipient(recipients: tuple[str, ...], most: int) -> None:
    octets = (REPORT + STATUS + ANN_FAILED * 200).encode()

    assert len(events_of(octets, EMAIL_ID, recipients, NOW)) == most
