"""A day in the life of a customer's address: it bounces, it is suppressed, support learns that the mailbox works again,
and the emails that were stopped are sent, each once."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from functools import partial
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
to_ann = partial(emails, 1, to=lambda _: ANN)


async def report_bounce(host: Host, email_id: UUID) -> None:
    """The provider reports that the address of an email's recipient does not exist."""
    async with make_pool(host.database_url, name="events", size=1) as pool:
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


def test_a_bounced_address_is_suppressed_and_after_its_removal_the_stopped_emails_are_sent_once(host: Host) -> None:
    command = CommandLine(host.folder, host.environment()).without_process
    run = host.run(WORKERS=1)
    # Morning: a receipt is accepted, and bounces an hour later.
    ids = host.enqueue(to_ann(name="morning"))
    assert host.await_finished(ids).counts == {"sent": 1}
    asyncio.run(report_bounce(host, *ids))

    def is_stopped() -> bool:
        tried = host.enqueue(to_ann(name=f"try-{len(ids)}"))
        ids.update(tried)
        return host.await_finished(tried).counts == {"failed": 1}

    # Noon: emails to the address are stopped, and all other emails are sent. The DLQ stays empty.
    eventually(is_stopped, "the suppression of the address")
    ids |= host.enqueue(emails(5, name="others"))
    counts = host.await_finished(ids).counts
    assert counts == {"sent": len(ids) - 1, "failed": 1}
    ((stopped, row),) = [(each, row) for each, row in host.rows().items() if row.status == "failed"]
    assert (row.error_type, host.rabbit.waiting(host.topology.dlq)) == ("suppressed", 0)
    # Afternoon: support looks, removes the entry, and replays.
    shown = command("suppressions", "remove", ANN, "--dry-run", "--json", *WHY).json
    assert (len(shown["suppressions"]), shown["stopped_email_ids"]) == (1, [str(stopped)])
    assert command("suppressions", "remove", ANN, "--replay", "--yes", *WHY).code == 0
    host.await_finished(ids)
    # Evening: the next email goes to the customer.
    ids |= host.enqueue(to_ann(name="evening"))
    books = host.await_finished(ids)
    stop(run)
    assert books.counts == {"sent": len(ids)}
    books.assert_balanced()
