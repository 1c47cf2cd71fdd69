"""In every situation, smtp returns the outcome in `docs/providers.md`; the server counts the emails."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from dispatcher.dev.smtp_behaviour import SmtpBehaviour, SmtpFault, Step
from dispatcher.domain.outcome import Accepted, Deferred, Reason, Rejected
from dispatcher.errors import ProviderFault
from tests.providers.emails import PATIENCE_SECONDS, SOON_SECONDS, an_email, send
from tests.providers.outcome_table import outcome_text
from tests.providers.places import smtp_place
from tests.waiting import until

THE_PAGE: Final = Path(__file__).parents[2] / "docs" / "providers.md"
LARGE: Final = "A line of a long letter.\n" * 40_000


@dataclass(frozen=True, slots=True)
class Case:
    """One way to cause the situation of a row of the table in docs/providers.md.

    Attributes:
        script: What the server does.
        arrived: How often the email is in the server's ledger.
        left: Whether the adapter calls `mark_on_wire`.
        code: The outcome's code.
        seconds: The attempt's deadline.
    """

    script: dict[Step, str] = field(default_factory=dict)
    arrived: int = 0
    left: bool = False
    code: str | None = None
    seconds: float = PATIENCE_SECONDS
    to: tuple[str, ...] = ("ann@example.com",)
    text: str = "Thank you.\n"
    size_limit: int = 0


SOON: Final = SOON_SECONDS
ROWS: Final[dict[tuple[str, str], list[Case]]] = {
    ("250 after the body", "accepted"): [
        Case(arrived=1, left=True),
        Case(arrived=1, left=True, text=LARGE),
    ],
    ("250 after the body, some recipients refused for good", "accepted"): [
        Case(arrived=1, left=True, to=("refused@example.com", "ann@example.com")),
    ],
    ("250 after the body, some recipients refused for now", "deferred recipient_deferred"): [
        Case(arrived=1, left=True, code="452 4.2.2", to=("full-1@example.com", "ann@example.com")),
        Case(
            arrived=1, left=True, code="451 4.7.1", to=("refused@example.com", "greylisted@example.com", "a@b.example")
        ),
    ],
    ("the greeting is 421 or 554", "deferred server_error"): [
        Case({Step.CONNECT: "421 4.3.2 busy"}, code="421 4.3.2"),
        Case({Step.CONNECT: "554 5.3.2 no"}, code="554 5.3.2"),
    ],
    ("the connection closes or is reset before the final dot", "deferred connection_failed"): [
        Case({Step.CONNECT: SmtpFault.CLOSE}),
        Case({Step.EHLO: SmtpFault.RESET}),
        Case({Step.MAIL: SmtpFault.CLOSE}),
        Case({Step.RCPT: SmtpFault.RESET}),
        Case({Step.DATA: SmtpFault.CLOSE}),
        Case({Step.BODY: SmtpFault.RESET}, text=LARGE * 8),
    ],
    ("the deadline passes before the final dot", "deferred timeout_before_send"): [
        Case({Step.CONNECT: SmtpFault.HANG}, seconds=SOON),
        Case({Step.EHLO: SmtpFault.DRIP}, seconds=SOON),
        Case({Step.MAIL: SmtpFault.HANG}, seconds=SOON),
        Case({Step.RCPT: SmtpFault.DRIP}, seconds=SOON),
        Case({Step.DATA: SmtpFault.HANG}, seconds=SOON),
        Case({Step.BODY: SmtpFault.FREEZE}, seconds=SOON, text=LARGE * 8),
    ],
    ("an invalid SMTP reply before the final dot", "deferred server_error"): [
        Case({Step.CONNECT: "HTTP/1.1 400 Bad Request"}),
        Case({Step.MAIL: "what?"}),
        Case({Step.RCPT: "250-no\r\n550 yes"}),
        Case({Step.DATA: "250 2.0.0 done"}, code="250 2.0.0"),
    ],
    ("a reply before its command, before the final dot", "deferred server_error"): [
        Case({Step.CONNECT: "220 hi\r\n250 Ok"}),
        Case({Step.DATA: "354 go\r\n250 2.0.0 Ok: queued"}),
        Case({Step.DATA: "354 go\r\n250 2.0.0 Ok: queued"}, text=LARGE),
    ],
    ("421 before the final dot", "deferred server_error"): [
        Case({Step.MAIL: "421 4.3.0 closing"}, code="421 4.3.0"),
        Case({Step.DATA: "421 closing"}, code="421"),
    ],
    ("4xx to MAIL, DATA or the body", "deferred server_error"): [
        Case({Step.MAIL: "451 4.3.0 no"}, code="451 4.3.0"),
        Case({Step.DATA: "450 wait"}, code="450"),
        Case({Step.END: "451 4.3.0 no"}, left=True, code="451 4.3.0"),
        Case({Step.END: "421 4.3.0 closing"}, left=True, code="421 4.3.0"),
    ],
    (
        "another 4xx, except 421, to every RCPT; 4.1.x, 4.2.x or greylisting at any point",
        "deferred recipient_deferred",
    ): [
        Case({Step.RCPT: "451 4.3.0 no"}, code="451 4.3.0"),
        Case({Step.RCPT: "450 4.7.1 recipient rate limit exceeded"}, code="450 4.7.1"),
        Case(code="451 4.7.1", to=("greylisted@example.com",)),
        Case({Step.RCPT: "450 4.2.1 busy mailbox"}, code="450 4.2.1"),
        Case({Step.RCPT: "452 4.2.2 mailbox over quota"}, code="452 4.2.2"),
        Case({Step.DATA: "451 4.7.1 Greylisted for 5 minutes"}, code="451 4.7.1"),
    ],
    ("4xx or 5xx about a quota or a rate, at any point", "deferred throttled"): [
        Case({Step.MAIL: "550 5.4.5 Daily user sending limit exceeded"}, code="550 5.4.5"),
        Case({Step.MAIL: "450 4.7.1 Error: too much mail"}, code="450 4.7.1"),
        Case({Step.MAIL: "421 4.7.0 [TSS04] Messages temporarily deferred"}, code="421 4.7.0"),
        Case({Step.RCPT: "550 Domain example.com has exceeded the max emails per hour"}, code="550"),
        Case({Step.RCPT: "451 4.3.2 Submission rate limit exceeded"}, code="451 4.3.2"),
        Case({Step.DATA: "432 4.3.2 Concurrent connections limit exceeded"}, code="432 4.3.2"),
        Case({Step.END: "554 5.2.0 SubmissionQuotaExceededException"}, left=True, code="554 5.2.0"),
        Case({Step.MAIL: "450 4.7.28 unusual rate"}, code="450 4.7.28"),
        Case({Step.END: "454 Throttling failure"}, left=True, code="454"),
    ],
    ("5xx about the sender; 5.1.x or 5.2.x to MAIL", "rejected rejected_sender"): [
        Case({Step.MAIL: "553 5.7.1 Sender address rejected: not owned by user"}, code="553 5.7.1"),
        Case({Step.MAIL: "550 5.1.1 no"}, code="550 5.1.1"),
        Case({Step.RCPT: "550 The from address does not match a verified Sender Identity"}, code="550"),
        Case({Step.MAIL: "501 5.1.7 bad"}, code="501 5.1.7"),
    ],
    ("5xx about the recipient: 5.1.x, 5.2.x or its words; 551 or 553 to every RCPT", "rejected rejected_recipient"): [
        Case(code="550 5.1.1", to=("refused@example.com",)),
        Case(code="550 5.1.1", to=("refused1@example.com", "refused2@example.com")),
        Case({Step.RCPT: "550 unknown user"}, code="550"),
        Case({Step.RCPT: "553 sorry"}, code="553"),
        Case({Step.RCPT: "552 mailbox full"}, code="552"),
    ],
    ("every RCPT refused, at least one with 4xx", "deferred recipient_deferred"): [
        Case(code="451 4.7.1", to=("refused@example.com", "greylisted@example.com")),
    ],
    ("552 without an enhanced code, 5.3.4 or 5.2.3; or above the announced SIZE", "rejected too_large"): [
        Case({Step.MAIL: "552 too big"}, code="552"),
        Case({Step.END: "554 5.3.4 big"}, left=True, code="554 5.3.4"),
        Case(size_limit=400, text=LARGE),
    ],
    ("5.6.x", "rejected invalid_content"): [
        Case({Step.END: "550 5.6.0 bad MIME"}, left=True, code="550 5.6.0"),
    ],
    ("500, 502, 503 or 5.5.1 to MAIL, RCPT or DATA", "deferred server_error"): [
        Case({Step.MAIL: "503 5.5.1 nested MAIL"}, code="503 5.5.1"),
        Case({Step.RCPT: "500 what?"}, code="500"),
        Case({Step.DATA: "502 5.5.1 not implemented"}, code="502 5.5.1"),
    ],
    ("another 5xx", "rejected refused"): [
        Case({Step.MAIL: "550 5.7.1 who?"}, code="550 5.7.1"),
        Case({Step.MAIL: "550 Unauthenticated senders not allowed"}, code="550"),
        Case({Step.RCPT: "504 5.5.2 need a fully qualified address"}, code="504 5.5.2"),
        Case({Step.RCPT: "554 5.7.1 Relay access denied"}, code="554 5.7.1"),
        Case({Step.RCPT: "550 no"}, code="550"),
        Case({Step.DATA: "554 no"}, code="554"),
        Case({Step.END: "554 5.7.1 spam"}, left=True, code="554 5.7.1"),
    ],
    ("530, 534, 535, 538; login refused; TLS not offered or not trusted", "ProviderFault"): [
        Case({Step.MAIL: "530 5.7.0 sign in first"}),
        Case({Step.RCPT: "530 5.7.0 sign in first"}),
    ],
    ("4xx or 5xx that refuses our name in EHLO, at any command", "ProviderFault"): [
        Case({Step.MAIL: "504 5.5.2 <[127.0.0.1]>: Helo command rejected: need fully-qualified hostname"}),
        Case({Step.RCPT: "504 5.5.2 <[127.0.0.1]>: Helo command rejected: need fully-qualified hostname"}),
        Case({Step.RCPT: "450 4.7.1 <web1>: Helo command rejected: Host not found"}),
        Case({Step.DATA: "550 5.7.1 HELO/EHLO does not resolve"}),
    ],
    ("no reply after the final dot", "uncertain"): [
        Case({Step.END: SmtpFault.CLOSE}, left=True),
        Case({Step.END: SmtpFault.RESET}, left=True),
        Case({Step.ANSWER: SmtpFault.CLOSE}, left=True, arrived=1),
        Case({Step.ANSWER: SmtpFault.RESET}, left=True, arrived=1, text=LARGE),
        Case({Step.ANSWER: SmtpFault.HANG}, left=True, arrived=1, seconds=SOON),
        Case({Step.ANSWER: SmtpFault.DRIP}, left=True, arrived=1, seconds=SOON),
    ],
    ("an invalid SMTP reply after the final dot", "uncertain"): [
        Case({Step.ANSWER: "<html>OK</html>"}, left=True, arrived=1),
        Case({Step.ANSWER: "2500 OK"}, left=True, arrived=1),
        Case({Step.ANSWER: "250-yes\r\n550 no"}, left=True, arrived=1),
        Case({Step.ANSWER: "354 more?"}, left=True, arrived=1, code="354"),
    ],
    ("contradictory replies after the final dot", "uncertain"): [
        Case({Step.ANSWER: "250 2.0.0 Ok\r\n550 5.7.1 no"}, left=True, arrived=1),
        Case({Step.ANSWER: "550 5.7.1 no\r\n250 2.0.0 Ok"}, left=True, arrived=1),
    ],
}
"""The keys are the table's first column, and its second and third columns together."""


PARAMETERS: Final = [
    pytest.param(expected, case, id=re.sub(r"[^a-z0-9]+", "-", f"{row} {number}".lower()))
    for (row, expected), cases in ROWS.items()
    for number, case in enumerate(cases, 1)
]


@pytest.mark.parametrize("pipelining", [True, False], ids=["pipelined", "one by one"])
@pytest.mark.parametrize(("expected", "case"), PARAMETERS)
async def test_each_situation_has_the_outcome_of_its_row(
    expected: str, case: Case, pipelining: bool, tmp_path: Path
) -> None:
    behaviour = SmtpBehaviour(script=dict(case.script), size_limit=case.size_limit)
    if not pipelining:
        behaviour.extensions = ("8BITMIME", "SMTPUTF8")
    email = an_email(to=case.to, text=case.text)
    async with smtp_place(tmp_path, behaviour) as place:
        try:
            sending = await send(place.provider, email, seconds=case.seconds, leaves=case.left)
        except ProviderFault:
            assert expected == "ProviderFault"
            assert not place.times()
            return

        assert sending.outcome is not None
        assert outcome_text(sending.outcome) == expected
        assert sending.left == case.left
        assert getattr(sending.outcome, "code", None) == case.code
        assert "@" not in (sending.outcome.detail or "")
        # The sink may still be reading after the deadline.
        await until(lambda: len(place.times()) == case.arrived)
        assert place.times()[str(email.email_id)] == case.arrived


@pytest.mark.parametrize(("expected", "case"), PARAMETERS)
async def test_the_next_email_is_not_affected(expected: str, case: Case, tmp_path: Path) -> None:
    """Whatever happened to an email, the next email on the same connection must not read replies to the previous
    email."""
    async with smtp_place(tmp_path, SmtpBehaviour(script=dict(case.script)), connections=1) as place:
        with contextlib.suppress(ProviderFault):
            await send(place.provider, an_email(to=case.to, text=case.text), seconds=case.seconds)
        place.sink.behaviour.script.clear()
        email = an_email()

        sending = await send(place.provider, email)

        assert isinstance(sending.outcome, Accepted), expected
        assert place.times()[str(email.email_id)] == 1


async def test_refused_recipients_are_listed_by_position_and_code(tmp_path: Path) -> None:
    email = an_email(to=("ann@example.com", "refused1@example.com"), bcc=("refused2@example.com", "bob@example.com"))
    async with smtp_place(tmp_path) as place:
        sending = await send(place.provider, email)

        assert isinstance(sending.outcome, Accepted)
        assert (sending.outcome.detail or "").startswith("refused recipients: 2-3 (550 5.1.1); 250 2.0.0 Ok")
        assert place.sink.received[0].recipients == ("ann@example.com", "bob@example.com")


async def test_a_refusals_detail_contains_no_address(tmp_path: Path) -> None:
    async with smtp_place(tmp_path) as place:
        sending = await send(place.provider, an_email(to=("refused@example.com",)))

    assert isinstance(sending.outcome, Rejected)
    assert sending.outcome.detail == "<address>: Recipient address rejected: User unknown in virtual mailbox table"


async def test_the_queue_id_is_recorded(tmp_path: Path) -> None:
    email = an_email()
    async with smtp_place(tmp_path) as place:
        sending = await send(place.provider, email)

    assert isinstance(sending.outcome, Accepted)
    assert sending.outcome.provider_message_id == f"{email.email_id}.1"


async def test_a_closed_port_is_connection_failed(tmp_path: Path) -> None:
    async with smtp_place(tmp_path) as place:
        await place.sink.close()

        sending = await send(place.provider, an_email())

    assert isinstance(sending.outcome, Deferred)
    assert sending.outcome.reason is Reason.CONNECTION_FAILED
    assert sending.left == 0


async def test_a_refusal_in_the_middle_of_a_large_body_counts(tmp_path: Path) -> None:
    async with smtp_place(tmp_path, SmtpBehaviour(script={Step.BODY: "552 5.3.4 enough"})) as place:
        sending = await send(place.provider, an_email(text=LARGE * 8))

    assert isinstance(sending.outcome, Rejected)
    assert sending.outcome.reason is Reason.TOO_LARGE
    assert sending.left == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"to": ("юзер@example.com",)}, Reason.REJECTED_RECIPIENT),
        ({"sender": "магазин@example.org"}, Reason.REJECTED_SENDER),
        ({"sender": "магазин@example.org", "to": ("юзер@example.com",)}, Reason.REJECTED_SENDER),
    ],
)
async def test_unicode_local_parts_need_smtputf8(
    changes: dict[str, tuple[str, ...] | str], reason: Reason, tmp_path: Path
) -> None:
    async with smtp_place(tmp_path) as place:
        accepted = await send(place.provider, an_email(**changes))
        parameters = place.sink.received[0].parameters
    async with smtp_place(tmp_path, SmtpBehaviour(extensions=("8BITMIME",))) as place:
        rejected = await send(place.provider, an_email(**changes))

    assert isinstance(accepted.outcome, Accepted)
    assert parameters.endswith("BODY=8BITMIME SMTPUTF8")
    assert isinstance(rejected.outcome, Rejected)
    assert rejected.outcome.reason is reason


def test_the_table_in_the_docs_has_the_same_rows() -> None:
    rows = re.findall(r"^\| (.+?) \| `(\w+)` \|(?: `(\w+)`)? *\|$", THE_PAGE.read_text(), re.MULTILINE)

    assert [(row, f"{outcome} {reason}".strip()) for row, outcome, reason in rows] == list(ROWS)
