"""A server refuses a whole backlog, at any step and in any words: no email fails, and no recipient is blamed.

No relay runs in these tests, so released emails stay pending.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from dispatcher.config.values import SmtpServer
from dispatcher.dev.smtp_behaviour import SmtpBehaviour, Step
from dispatcher.dev.smtp_sink import SmtpSink, running_sink
from dispatcher.domain.outcome import Reason, Rejected
from dispatcher.providers.smtp import SmtpProvider, SmtpSettings
from tests.providers.places import smtp_place
from tests.waiting import until, until_answer
from tests.worker.bench import Bench
from tests.worker.scripted import ScriptedProvider, answer

DOMAINS = 10
BACKLOG = 1_000
FAULTS = {
    "greeting, blocked host": ({Step.CONNECT: "554 5.7.1 Your IP is blocked"}, "Your IP is blocked", 0),
    "login, no credits": (
        {Step.AUTH: "535 5.7.8 Authentication failed: Maximum credits exceeded"},
        "refuses the login",
        0,
    ),
    "MAIL, daily quota": ({Step.MAIL: "550 5.4.5 Daily user sending limit exceeded"}, "Daily user sending", 3000),
    "MAIL, no login": ({Step.MAIL: "550 Unauthenticated senders not allowed"}, "Unauthenticated", 0),
    "MAIL, sender": ({Step.MAIL: "553 5.7.1 Sender address rejected: not owned by user"}, "not owned by", 0),
    "MAIL, unknown words": ({Step.MAIL: "550 5.7.1 Rule 7 says no"}, "Rule 7 says no", 0),
    "RCPT, hourly quota": (
        {Step.RCPT: "550 Domain example.com has exceeded the max emails per hour (101/100) allowed"},
        "max emails per hour",
        3000,
    ),
    "RCPT, relay": ({Step.RCPT: "554 5.7.1 Relay access denied"}, "Relay access denied", 0),
    "RCPT, blocklist": ({Step.RCPT: "554 5.7.1 Client host [192.0.2.1] blocked using a list"}, "Client host", 0),
    "RCPT, unknown words": ({Step.RCPT: "550 Rule 7 says no"}, "Rule 7 says no", 0),
    "RCPT, too fast": ({Step.RCPT: "450 4.7.1 Error: too much mail"}, "throttled", 0),
    "DATA, quota": ({Step.DATA: "452 4.3.1 Hourly quota exceeded"}, "Hourly quota", 3000),
    "DATA, unknown words": ({Step.DATA: "554 Rule 7 says no"}, "Rule 7 says no", 0),
    "after the body, quota": (
        {Step.END: "554 5.2.0 STOREDRV.Submission.Exception:SubmissionQuotaExceededException"},
        "SubmissionQuota",
        3000,
    ),
    "after the body, suspended": ({Step.END: "554 Sending suspended for this account"}, "suspended", 0),
    "after the body, unknown words": ({Step.END: "554 5.7.1 Rule 7 says no"}, "Rule 7 says no", 0),
}
"""What the server does, a part of the reason that operators are told, and for how many seconds it lasts at least."""


async def enqueue_backlog(bench: Bench, count: int = BACKLOG) -> None:
    """Enqueues emails of one sender, to ten domains in turn."""
    emails = [
        email_id
        for number in range(max(1, count // 10))
        for email_id in bench.books.enqueue(min(count, 10), to=f"ann@shop{number % DOMAINS}.example")
    ]
    await bench.deliver(emails)


def smtp_provider(sink: SmtpSink, *, logs_in: bool) -> SmtpProvider:
    server = SmtpServer("127.0.0.1", sink.port, "none", *(("user", "password") if logs_in else ()))
    return SmtpProvider(SmtpSettings(url=server))


@pytest.mark.parametrize("with_second", [False, True], ids=["alone", "with a second provider"])
@pytest.mark.parametrize("case", FAULTS)
async def test_a_refused_backlog_stays_pending_or_goes_to_the_second_provider(
    case: str, with_second: bool, bench: Bench, tmp_path: Path
) -> None:
    script, told, lasts = FAULTS[case]
    behaviour = SmtpBehaviour(script=dict(script), login=("user", "password") if Step.AUTH in script else None)
    second = ScriptedProvider("second")
    async with running_sink(tmp_path / "sink", behaviour) as sink:
        smtp = smtp_provider(sink, logs_in=Step.AUTH in script)
        await bench.start([smtp, second] if with_second else [smtp])
        await enqueue_backlog(bench)

        (reason,) = await until(lambda: reasons(bench))  # now, because a throttled provider's pause is short
        if with_second:
            await bench.settled({"sent": BACKLOG})
            assert second.accepted == dict.fromkeys(second.accepted, 1)
        else:
            await bench.settled({"pending": BACKLOG})
        assert told in reason[0]
        assert reason[1] >= lasts
        assert not sink.received
        blamed = bench.books.select("select error_type from every_attempt where outcome = 'rejected'")
        assert blamed == []


def reasons(bench: Bench) -> list[tuple[str, float]]:
    """Why the worker does not use a provider, and for how many seconds."""
    rows = bench.books.select(
        "select reason, extract(epoch from until_at - changed_at)::float8 as seconds from provider_state"
        " where state <> 'closed'"
    )
    return [(row["reason"], row["seconds"] or 0.0) for row in rows]


@pytest.mark.parametrize("case", ["RCPT, relay", "RCPT, unknown words", "MAIL, sender"])
async def test_three_refused_emails_are_enough(case: str, bench: Bench, tmp_path: Path) -> None:
    async with smtp_place(tmp_path / "sink", SmtpBehaviour(script=dict(FAULTS[case][0]))) as place:
        await bench.start([place.provider])
        for number in range(3):
            await bench.enqueue(to=f"ann@shop{number}.example")

        await until(lambda: reasons(bench) != [])

        await bench.settled({"pending": 3})
        assert bench.books.select("select * from every_attempt") == []


async def test_the_log_says_why_an_email_waits_whose_refusal_is_undecided(bench: Bench, tmp_path: Path) -> None:
    async with smtp_place(tmp_path / "sink", SmtpBehaviour(script=dict(FAULTS["RCPT, relay"][0]))) as place:
        await bench.start([place.provider])
        with capture_logs() as logs:
            (email_id,) = await bench.enqueue(to="ann@shop.example")

            await until(lambda: any(each["event"] == "email.refusal_undecided" for each in logs))

        line = next(each for each in logs if each["event"] == "email.refusal_undecided")
        assert (line["email_id"], line["provider"]) == (str(email_id), "smtp")
        assert (line["error_type"], line["provider_code"]) == (Reason.REFUSED, "554 5.7.1")
        assert line["reason"] == "Relay access denied"
        assert line["retry_in_seconds"] > 0
        assert bench.books.statuses() == {"sending": 1}


async def test_when_the_server_recovers_every_email_is_sent_once(bench: Bench, tmp_path: Path) -> None:
    behaviour = SmtpBehaviour(script={Step.RCPT: "550 Rule 7 says no"})
    async with smtp_place(tmp_path / "sink", behaviour) as place:
        await bench.start([place.provider])
        await enqueue_backlog(bench, 100)
        await bench.settled({"pending": 100})
        behaviour.script.clear()

        await bench.deliver([row["email_id"] for row in bench.books.rows()])

        await bench.settled({"sent": 100})
        assert set(place.times().values()) == {1}
        assert {row["attempt_count"] for row in bench.books.rows()} == {1}


async def test_an_email_that_both_providers_refuse_fails_alone(bench: Bench) -> None:
    first, second = ScriptedProvider("first"), ScriptedProvider("second")
    await bench.start([first, second])
    (bad,) = bench.books.enqueue(1, to="bad@bad.example")
    for provider in (first, second):
        provider.script[bad].extend([answer(Rejected(Reason.REFUSED, "Rule 7 says no", "550"))] * 9)
    await bench.deliver([bad])

    async def it_failed() -> bool:
        await bench.enqueue()
        return bench.books.status(bad) == "failed"

    await until_answer(it_failed)
    assert (first.calls.count(bad), second.calls.count(bad)) == (2, 1)
    await until(lambda: set(bench.books.statuses()) == {"failed", "sent"})
    assert reasons(bench) == []


@pytest.mark.parametrize("are_first", [False, True], ids=["scattered", "first"])
@pytest.mark.parametrize(
    "words",
    [
        "550 5.1.1 no such mailbox",
        "550 no such user",
        "553 sorry",
        "552 5.2.2 mailbox full",
        "554 5.7.1 Rejected by the recipient's spam policy",
    ],
)
async def test_each_bad_recipient_fails_alone(words: str, are_first: bool, bench: Bench, tmp_path: Path) -> None:
    async with smtp_place(tmp_path / "sink", SmtpBehaviour(refusal=words)) as place:
        await bench.start([place.provider])
        emails = []
        for number in range(50):
            good = bench.books.enqueue(20, to=f"ann@shop{number % DOMAINS}.example")
            bad = bench.books.enqueue(1, to=f"refused{number}@shop{number % DOMAINS}.example")
            emails += bad + good
        await bench.deliver(sorted(emails, key=lambda each: emails.index(each) % 21 > 0) if are_first else emails)

        await bench.settled({"sent": BACKLOG, "failed": 50})
        rows = bench.books.select("select error_type, attempt_count from email_log where status = 'failed'")
        assert {(row["error_type"], row["attempt_count"]) for row in rows} == {(Reason.REJECTED_RECIPIENT, 1)}
        assert reasons(bench) == []
