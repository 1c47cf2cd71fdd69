"""A server that accepts and is gone before it answers: every email left once, and says so."""

from __future__ import annotations

import asyncio
from pathlib import Path

from dispatcher.config.values import SmtpServer
from dispatcher.dev.smtp_behaviour import SmtpBehaviour, SmtpFault, Step
from dispatcher.dev.smtp_sink import running_sink
from dispatcher.domain.outcome import Uncertain
from dispatcher.providers.smtp import SmtpProvider, SmtpSettings
from tests.providers.emails import an_email, send

EMAILS = 200


async def test_emails_that_were_accepted_without_an_answer_leave_once_each(tmp_path: Path) -> None:
    async with running_sink(tmp_path, SmtpBehaviour(script={Step.ANSWER: SmtpFault.CLOSE})) as sink:
        provider = SmtpProvider(SmtpSettings(url=SmtpServer("127.0.0.1", sink.port, "none")))
        sendings = await asyncio.gather(*(send(provider, an_email()) for _ in range(EMAILS)))
        await provider.close()
        ledger = sink.ledger()

    assert {type(sending.outcome) for sending in sendings} == {Uncertain}
    assert (len(ledger.entries), ledger.delivered, dict(ledger.duplicates)) == (EMAILS, EMAILS, {})
