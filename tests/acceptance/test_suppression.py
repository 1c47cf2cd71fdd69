"""A day in the life of a customer's address: it bounces, it is suppressed, support learns that the mailbox works again,
and the emails that were stopped are sent, each once."""

from __future__ import annotations

import asyncio
import signal
from datetime import UTC, datetime
from uuid import UUID

from dispatcher.domain.event import Bounce, EventKind, ProviderEvent
from dispatcher.domain.suppression import SuppressionRules
from dispatcher.events.intake import EventIntake
from dispatcher.store.connections import make_pool
from tests.acceptance.harness import Host, emails, stop
from tests.cli.commandline import CommandLine
from tests.supervisor.program import eventually

ANN = "ann@example.org"
WHY = ("--reason", "the customer's mailbox works again")


def report_bounce(host: Host, email_id: UUID) -> None:
    """The provider reports that the address of an email's recipient does not exist."""

    async def report() -> None:
        pool = make_pool(host.database_url, name="events", size=1)
        await pool.open()
        bounced = ProviderEvent(
            email_id=email_id,
            provider="capture",
            kind=EventKind.BOUNCED,
            bounce=Bounce.HARD,
            happened_at=datetime.now(UTC),
            recipient=ANN,
            code="5.1.1",
        )
        await EventIntake(pool, SuppressionRules()).store([bounced])
        await pool.close()

    asyncio.run(report())


def to_ann(_: int) -> str:
    return ANN


def await_suppression(host: Host) -> set[UUID]:
    """Enqueues emails to the address until the worker stops one of them; returns all of them."""
    tried: set[UUID] = set()

    def is_stopped() -> bool:
        (email_id,) = host.enqueue(emails(1, name=f"try-{len(tried)}", to=to_ann))
        tried.add(email_id)
        return host.await_finished([email_id]).counts == {"failed": 1}

    eventually(is_stopped, "the suppression of the address")
    return tried


def test_a_bounced_address_is_suppressed_and_after_its_removal_the_stopped_emails_are_sent_once(host: Host) -> None:
    command = CommandLine(host.folder, host.environment()).without_process
    run = host.run(WORKERS=1)
    # Morning: a receipt is accepted, and bounces an hour later.
    (first,) = host.enqueue(emails(1, name="morning", to=to_ann))
    assert host.await_finished([first]).counts == {"sent": 1}
    report_bounce(host, first)
    (entry,) = command("suppressions", "list", "--json").json["suppressions"]
    assert (entry["recipient"], entry["kind"], entry["source_email_id"]) == (
        "a•••@example.org",
        "hard_bounce",
        str(first),
    )
    tried = await_suppression(host)
    # Noon: emails to the address are stopped, and all other emails are sent. The DLQ stays empty.
    others = host.enqueue(emails(20, name="others"))
    assert host.await_finished(others).counts == {"sent": 20}
    stopped = host.enqueue(emails(5, name="noon", to=to_ann))
    assert host.await_finished(stopped).counts == {"failed": 5}
    stopped |= {each for each in tried if host.rows()[each].status == "failed"}
    assert {host.rows()[each].error_type for each in stopped} == {"suppressed"}
    assert host.rabbit.waiting(host.topology.dlq) == 0
    # Afternoon: support looks, removes the entry, and replays.
    shown = command("suppressions", "remove", ANN, "--dry-run", "--json", *WHY).json
    assert (len(shown["suppressions"]), set(shown["stopped_email_ids"])) == (1, set(map(str, stopped)))
    run.send_to(run.pid_of("worker 0"), signal.SIGKILL)
    done = command("suppressions", "remove", ANN, "--replay", "--yes", *WHY)
    assert done.code == 0, done.stderr
    books = host.await_finished(stopped)
    assert books.counts == {"sent": 6}
    # Evening: a second removal finds nothing to send, and the next email goes to the customer.
    again = command("suppressions", "remove", ANN, "--replay", "--yes", *WHY)
    assert again.code == 1
    (last,) = host.enqueue(emails(1, name="evening", to=to_ann))
    books = host.await_finished({first, last, *others, *tried, *stopped})
    assert books.counts == {"sent": 27 + len(tried)}
    books.assert_balanced()
    stop(run)
