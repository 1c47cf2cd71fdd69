"""If a server accepts an email but closes the connection before it replies, the email is sent once and its outcome is
uncertain."""

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


async def test_emails_accepted_without_a_reply_are_sent_once_each(tmp_path: Path) -> None:
    async with running_sink(tmp_path, SmtpBehaviour(script={Step.ANSWER: SmtpFault.CLOSE})) as sink:
        provider = SmtpProvider(SmtpSettings(url=SmtpServer("127.0.0.1", sink.port, "none")))
        sendings = await asyncio.gather(*(send(provider, an_email()) for _ in range(EMAILS)))
        await provider.close()
        ledger = sink.ledger()

    assert {type(sending.outcome) for sending in sendings} == {Uncertain}
    assert (len(ledger.entries), ledger.delivered, dict(ledger.duplicates)) == (EMAILS, EMAILS, {})
