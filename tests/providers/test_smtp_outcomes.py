"""In every situation, smtp returns the outcome in `docs/providers.md`; the server counts the emails."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from dispatcher.dev.smtp_behaviour import SmtpBehaviour, SmtpFault, Step
from dispatcher.domain.outcome import Accepted
from dispatcher.errors import ProviderFault
from tests.providers.emails import PATIENCE_SECONDS, SOON_SECONDS, an_email, outcome_text, send
from tests.providers.places import smtp_place
from tests.waiting import until

THE_PAGE: Final = Path(__file__).parents[2] / "docs" / "providers.md"
LARGE: Final = "A line of a long letter.\n" * 40_000


@dataclass(frozen=True, slots=True)
class Case:
    """One way to cause the situation of a row of the table in docs/providers.md; whether the email `left`, how often it
    arrived."""

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
        Case({Step.BODY: "552 5.3.4 enough"}, code="552 5.3.4", text=LARGE * 8),
        Case(size_limit=5000, text=LARGE),
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


def kinds_of(case: Case) -> tuple[str, ...]:
    """Whether the outcome may depend on the commands that arrive together."""
    depends = case.script.keys() & {Step.MAIL, Step.RCPT, Step.DATA} or case.to != ("ann@example.com",)
    return ("pipelined", "one by one") if depends else ("pipelined",)


PARAMETERS: Final = [
    pytest.param(expected, case, kind, id=re.sub(r"[^a-z0-9]+", "-", f"{row} {number} {kind}".lower()))
    for (row, expected), cases in ROWS.items()
    for number, case in enumerate(cases, 1)
    for kind in kinds_of(case)
]


@pytest.mark.parametrize(("expected", "case", "kind"), PARAMETERS)
async def test_each_situation_has_the_outcome_of_its_row_and_does_not_affect_the_next_email(
    expected: str, case: Case, kind: str, tmp_path: Path
) -> None:
    """Whatever happened to an email, the next email on the same connection must not read replies to this one."""
    behaviour = SmtpBehaviour(script=dict(case.script), size_limit=case.size_limit)
    if kind == "one by one":
        behaviour.extensions = ("8BITMIME", "SMTPUTF8")
    email, following = an_email(to=case.to, text=case.text), an_email()
    async with smtp_place(tmp_path, behaviour, connections=1) as place:
        if expected == "ProviderFault":
            with pytest.raises(ProviderFault):
                await send(place.provider, email)
        else:
            sending = await send(place.provider, email, seconds=case.seconds, leaves=case.left)
            assert outcome_text(sending.outcome) == expected
            assert (sending.left, getattr(sending.outcome, "code", None)) == (case.left, case.code)
            assert "@" not in (getattr(sending.outcome, "detail", None) or "")
            if isinstance(sending.outcome, Accepted):
                assert sending.outcome.provider_message_id == f"{email.email_id}.1"
        behaviour.script.clear()

        assert isinstance((await send(place.provider, following)).outcome, Accepted)
        # The sink may still be reading after the deadline.
        arrived = {str(email.email_id): case.arrived, str(following.email_id): 1}
        await until(lambda: place.times() == +Counter(arrived))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"to": ("юзер@example.com",)}, "rejected_recipient"),
        ({"sender": "магазин@example.org"}, "rejected_sender"),
        ({"sender": "магазин@example.org", "to": ("юзер@example.com",)}, "rejected_sender"),
    ],
)
async def test_unicode_local_parts_need_smtputf8(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    async with smtp_place(tmp_path) as place:
        assert isinstance((await send(place.provider, an_email(**changes))).outcome, Accepted)
        assert place.sink.received[0].parameters.endswith("BODY=8BITMIME SMTPUTF8")
    async with smtp_place(tmp_path, SmtpBehaviour(extensions=("8BITMIME",))) as place:
        rejected = await send(place.provider, an_email(**changes))

    assert outcome_text(rejected.outcome) == f"rejected {reason}"


def test_the_table_in_the_docs_has_the_same_rows() -> None:
    rows = re.findall(r"^\| (.+?) \| `(\w+)` \|(?: `(\w+)`)? *\|$", THE_PAGE.read_text(), re.MULTILINE)

    assert [(row, f"{outcome} {reason}".strip()) for row, outcome, reason in rows] == list(ROWS)
