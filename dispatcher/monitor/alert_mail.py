"""Emails notices to operators, directly through an SMTP server that is configured only for alerts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime
from pathlib import Path
from typing import Final

import aiosmtplib

from dispatcher.config.values import SmtpServer
from dispatcher.domain.alert import NotDelivered, Notice
from dispatcher.monitor.alert_words import subject, text
from dispatcher.transport.destination import cause_of
from dispatcher.transport.smtp_connection import default_ehlo_name
from dispatcher.transport.tls import client_context

TOTAL_SECONDS: Final = 15.0
# Allows long lines, so that the Subject is not folded (split into several lines). A folded Subject can have an empty
# first line, and some mail readers show such a Subject wrongly.
_WHOLE_LINES: Final = SMTP.clone(max_line_length=900)


@dataclass(eq=False, repr=False)
class MailChannel:
    """Emails each notice to all configured recipients. Succeeds if the server accepts at least one of them.

    Trusts the certificates of `ca_file` instead of the system's. `total_seconds` includes the time to connect.
    """

    server: SmtpServer
    sender: str
    recipients: Sequence[str]
    _: KW_ONLY
    ca_file: Path | None = None
    total_seconds: float = TOTAL_SECONDS
    name = "email"

    async def send(self, notice: Notice) -> str:
        try:
            async with asyncio.timeout(self.total_seconds):
                refused = await self._send(self._message(notice))
        except TimeoutError:
            raise NotDelivered(f"no answer within {self.total_seconds:g} s") from None
        except (aiosmtplib.SMTPException, OSError, UnicodeError) as error:
            raise NotDelivered(_cause(error)) from error
        taken = len(self.recipients) - refused
        return f"the SMTP server accepted the alert for {taken} of {len(self.recipients)} recipients"

    async def _send(self, message: EmailMessage) -> int:
        """Returns the number of refused recipients. If all are refused, raises an SMTPException."""
        server = self.server
        client = aiosmtplib.SMTP(
            hostname=server.host,
            port=server.port,
            username=server.username or None,
            password=server.password or None,
            use_tls=server.security == "tls",
            start_tls=server.security == "starttls",
            tls_context=None if server.security == "none" else client_context(self.ca_file),
            timeout=self.total_seconds,
            # By default, aiosmtplib resolves this host's full name, which blocks the event loop.
            local_hostname=default_ehlo_name("127.0.0.1"),
        )
        async with client:
            refused, _ = await client.sendmail(self.sender, list(self.recipients), message.as_bytes())
            return len(refused)

    def _message(self, notice: Notice) -> EmailMessage:
        message = EmailMessage(_WHOLE_LINES)
        message["From"] = self.sender
        message["To"] = ", ".join(self.recipients)
        message["Subject"] = subject(notice)
        message["Date"] = format_datetime(notice.at)
        # Each retry has the same id, so a mailbox shows the notice once.
        message["Message-ID"] = f"<{notice.notice_id}@{self.sender.rpartition('@')[2]}>"
        # Prevents automatic replies (RFC 3834).
        message["Auto-Submitted"] = "auto-generated"
        message.set_content(text(notice))
        return message


def _cause(error: Exception) -> str:
    """Why the notice was not accepted. Does not repeat the server's own text, which may contain addresses."""
    if isinstance(error, aiosmtplib.SMTPRecipientsRefused):
        codes = sorted({one.code for one in error.recipients})
        return f"the SMTP server refused every recipient ({', '.join(map(str, codes))})"
    if isinstance(error, aiosmtplib.SMTPResponseException):
        return f"the SMTP server answered {error.code}"
    cause = error.__cause__ if isinstance(error, aiosmtplib.SMTPConnectError) and error.__cause__ else error
    return f"no connection to the SMTP server: {cause_of(cause)}"
