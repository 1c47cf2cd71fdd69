"""One message in the bounce mailbox takes at most 100 ms of CPU, whatever it contains and whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

import pytest

from dispatcher.domain.event import Bounce
from dispatcher.events.bounce_parser import MAX_RECIPIENTS, MAX_UNKNOWN_RECIPIENTS, events_of
from dispatcher.events.maildir import MAX_OCTETS
from tests.cpu import takes_cpu
from tests.events.test_bounce_corpus import ANN, EMAIL_ID, octets_of

MAX_SECONDS: Final = 0.1
NOW: Final = datetime(2026, 11, 23, 10, 5, tzinfo=UTC)
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
    """A text with each of many recipients in turn, long enough to fill a message."""
    return "".join(form.format(address) for address in CROWD)


SHAPES: Final[Mapping[str, tuple[str, str]]] = {
    # What a message begins with, and what is repeated until the message has the size that the monitor reads.
    "blocks": (REPORT + STATUS, ANN_FAILED),
    "blocks after a text about the recipient": (REPORT + f"<{ANN}> is here\n" * 400 + STATUS, ANN_FAILED),
    "blocks after many paragraphs": (REPORT + f"<{ANN}> is here\n\n" * 400 + STATUS, ANN_FAILED),
    "blocks after many reasons": (REPORT + f"550 {ANN}\n\n" * 400 + STATUS, ANN_FAILED),
    "blocks of a crowd after a text about it": (
        REPORT + _of_crowd("{} mailbox address message\n")[:9000] + STATUS,
        _of_crowd("Final-Recipient: rfc822; {}\nAction: failed\n\n"),
    ),
    "blocks with long reasons": (REPORT + STATUS, ANN_FAILED[:-1] + f"Diagnostic-Code: smtp; {'mailbox ' * 1000}\n\n"),
    "blocks with many codes": (REPORT + STATUS, ANN_FAILED[:-1] + f"Diagnostic-Code: smtp; {'5.4.1 ' * 1000}\n\n"),
    "blocks of one field": (REPORT + STATUS, "Action: f\n\n"),
    "blocks of nothing": (REPORT + STATUS, "a:\n\n"),
    "blocks in UTF-8": (REPORT + GLOBAL, "Final-Recipient: utf-8; jörg@müller.example\nAction: failed\n\n"),
    "blocks as text": (TEXT, ANN_FAILED),
    "blocks in many text parts": (REPORT, f"--B\n\n{ANN_FAILED}"),
    "parts": (REPORT, "--B\n\n"),
    "nested parts": (NESTED, "x\n"),
    "nested parts with dashes": (NESTED, "--1x\n"),
    "text about a recipient": (TEXT, f"<{ANN}>:\n550 mailbox \n\n"),
    "text about a crowd": (TEXT, _of_crowd("<{}>: mailbox address message")),
    "text with almost-matching words": (TEXT, "mailbox address message account 5.4.1 sender "),
    "text in UTF-8": (f"{HEAD}Content-Type: text/plain; charset=utf-8\n\n", "jörg@müller.example\n"),
    "quoted text": (TEXT, "> > > >\n"),
    "one long line": (TEXT, "a"),
    "one long line of dashes": (TEXT, "- "),
    "digits": (TEXT, "1."),
    "spaces": (TEXT, " "),
    "lines of spaces": (TEXT, "\n \t "),
    "blank lines": (TEXT, "\n"),
    "blank CRLF lines": (TEXT, "\r\n"),
    "carriage returns": (TEXT, "\r"),
    "short paragraphs": (TEXT, "x\n\n"),
    "tags": (HTML, "<"),
    "styles": (HTML, "<style "),
    "line breaks": (HTML, "<br "),
    "fields": (HEAD, "X-A: b\n"),
    "a folded field": (HEAD, " b\n"),
    "an encoded subject": ("From: MAILER-DAEMON\nSubject: ", "=?utf-8?q?a?= "),
    "an encoded sender": ("Subject: x\nFrom: ", "=?utf-8?b?YQ==?= "),
    "a long date": ("Date: ", "1 "),
    "failed recipients": ("X-Failed-Recipients: ", f"{ANN}, "),
    "parameters": (f"{HEAD}Content-Type: text/plain", ";a=b"),
    "open parameters": (f"{HEAD}Content-Type: text/plain", ';a*1="b'),
    "parts of a boundary": (f"{HEAD}Content-Type: multipart/mixed", '; boundar*1*="b"'),
    "recipients of a complaint": (FEEDBACK, f"Original-Rcpt-To: {ANN}\n"),
    "recipients in xtext": (FEEDBACK, "Original-Rcpt-To: a" + "+2B" * 300 + "@example.org\n"),
    "mailboxes of a copy": (COPY, f"Delivered-To: {ANN}\n"),
}


@pytest.mark.parametrize("recipients", [(), (ANN,), CROWD], ids=["unknown", "one", "crowd"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_hostile_message_takes_little_cpu_time(shape: str, recipients: tuple[str, ...]) -> None:
    beginning, repeated = (part.encode() for part in SHAPES[shape])
    octets = (beginning + repeated * (MAX_OCTETS // len(repeated) + 1))[:MAX_OCTETS]

    def read() -> None:
        with suppress(ValueError):  # the message is refused
            events_of(octets, EMAIL_ID, recipients, NOW)

    assert takes_cpu(read, at_most=MAX_SECONDS)


@pytest.mark.parametrize(("recipients", "most"), [((), MAX_UNKNOWN_RECIPIENTS), ((ANN,), 1), (CROWD[:7], 7)])
def test_a_report_has_at_most_as_many_events_as_the_email_had_recipients(
    recipients: tuple[str, ...], most: int
) -> None:
    octets = (REPORT + STATUS + ANN_FAILED * 200).encode()

    assert len(events_of(octets, EMAIL_ID, recipients, NOW)) == most


def test_blank_lines_before_a_status_do_not_hide_it() -> None:
    status = b"Content-Type: message/delivery-status\n\n"
    content = octets_of("postfix-user-unknown")

    (event,) = events_of(content.replace(status, status + b"\n" * MAX_OCTETS), EMAIL_ID, (ANN,), NOW)

    assert event.bounce is Bounce.HARD


def test_each_of_a_hundred_recipients_has_a_reason_of_its_own() -> None:
    blocks = "".join(
        f"Final-Recipient: rfc822; {address}\nAction: failed\nStatus: 5.1.1\n"
        f"Diagnostic-Code: smtp; 550 5.1.1 <{address}>: Recipient address rejected: User unknown\n\n"
        for address in CROWD
    )

    events = events_of((REPORT + STATUS + blocks).encode(), EMAIL_ID, CROWD, NOW)

    assert [event.recipient for event in events] == list(CROWD)
    assert {event.bounce for event in events} == {Bounce.HARD}
