"""One email on one SMTP connection: MAIL, RCPT, DATA, body, and what the replies make of it.

The server can accept nothing before it has read the final dot (RFC 5321, section 4.1.1.4). A small body and its dot
leave in one write, `leaving` just before it. A large body goes first, with the dot held back until the system has taken
the rest: then a connection that breaks half-way through ten megabytes is a definite no.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from dispatcher.domain.outcome import Concern, Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.errors import ProviderFault
from dispatcher.transport.body import Body
from dispatcher.transport.call import Call
from dispatcher.transport.mime import RenderedEmail
from dispatcher.transport.smtp_connection import NAME, SmtpConnection
from dispatcher.transport.smtp_conversation import (
    ConnectionBroke,
    Conversation,
    GarbledReply,
    OutOfStep,
    ServerClosing,
)
from dispatcher.transport.smtp_replies import SmtpPhase, SmtpReply, acceptance, no_recipient_left, refusal

START_INPUT: Final = 354
"""The one reply that asks for the body."""
LARGE_BODY_OCTETS: Final = 64 * 1024
"""What a socket takes at once anyway; below, waiting for it would cost more than it tells."""
PATIENCE_SECONDS: Final = 10.0
"""How long a kept connection may take to its first reply before we try a new one; at most half of the time left."""
ANSWERS_SHARE: Final = 0.25
MOST_FOR_ANSWER_SECONDS: Final = 5.0
"""Of a transaction's time so much is the last reply's, at most five seconds: servers look into an email before they
answer for it. What could only leave in that time stays."""


class Transaction:
    """One attempt for one email, over one connection or, if a kept one turns out dead, two.

    Attributes:
        phase: How far it has come.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._latest = 0.0
        self.phase = SmtpPhase.WAITING

    async def run(self, email: RenderedEmail, connection: SmtpConnection, *, kept: bool) -> Outcome:
        """What the server said. The connection is used up, in order or broken: `is_sound` tells.

        Args:
            kept: The connection has carried emails before, and may have died since.

        Raises:
            ConnectionBroke: no answer; `silence` tells what that means.
            ProviderFault: the server wants credentials or TLS before it takes any email.
        """
        if unfit := _unfit(email, connection):
            return unfit
        left = self._call.deadline - self._loop.time()
        self._latest = self._call.deadline - min(MOST_FOR_ANSWER_SECONDS, max(0.0, left) * ANSWERS_SHARE)
        refused = await self._envelope(email, connection, kept=kept)
        if not isinstance(refused, list):
            connection.needs_reset = True
            return refused
        reply = await self._content(email.body, connection.conversation)
        connection.emails += 1
        if reply.is_positive and self.phase is SmtpPhase.FINAL:
            return acceptance(reply, refused)
        connection.needs_reset = True
        return _judged(reply, self.phase, connection.conversation)

    def silence(self, broke: ConnectionBroke | None) -> Deferred | Uncertain:
        """What it means that no answer came: the connection broke, or (None) the deadline passed."""
        detail = f"{broke or 'the deadline passed'} {self.phase}"
        if self.phase is SmtpPhase.FINAL:
            return Uncertain(detail)
        concern = Concern.PROVIDER if self.phase in (SmtpPhase.WAITING, SmtpPhase.CONNECTING) else Concern.EITHER
        if broke is None:
            return Deferred(Reason.TIMEOUT_BEFORE_SEND, detail, known_concern=concern)
        if isinstance(broke, ServerClosing):
            judged = refusal(broke.reply, self.phase)
            assert isinstance(judged, Deferred)
            return judged
        reason = Reason.SERVER_ERROR if isinstance(broke, GarbledReply) else Reason.CONNECTION_FAILED
        return Deferred(reason, detail, known_concern=concern)

    async def _envelope(
        self, email: RenderedEmail, connection: SmtpConnection, *, kept: bool
    ) -> list[tuple[int, SmtpReply]] | Outcome:
        """The refused recipients, once the server waits for the body; an outcome if it does not."""
        self.phase = SmtpPhase.MAIL
        patience = min(PATIENCE_SECONDS, (self._call.deadline - self._loop.time()) / 2) if kept else None
        dialogue = Dialogue(connection.conversation, _commands(email, connection), connection.has_pipelining, patience)
        if connection.needs_reset:
            await dialogue.reset_done()
            connection.needs_reset = False
        mail = await dialogue.next()
        if not mail.is_positive:
            await dialogue.back_out()
            return self._refusal(mail, connection.conversation)
        self.phase = SmtpPhase.RCPT
        refused = [
            (position, reply)
            for position in range(1, len(email.recipients) + 1)
            if not (reply := await dialogue.next()).is_positive
        ]
        if len(refused) == len(email.recipients):
            await dialogue.back_out()
            ours = next((reply for _, reply in refused if reply.blames_our_setup), None)
            return self._refusal(ours, connection.conversation) if ours else no_recipient_left(refused)
        self.phase = SmtpPhase.DATA
        data = await dialogue.next()
        return refused if data.code == START_INPUT else self._refusal(data, connection.conversation)

    async def _content(self, content: Body, conversation: Conversation) -> SmtpReply:
        """The reply to the email, or one that came before its end.

        Raises:
            ConnectionBroke: there is no reply; or the server replied before the final dot, which was not sent then; or
                two replies after the dot contradict each other.
        """
        await conversation.hear()
        conversation.check()
        body, owed = b"", 0
        if len(content) > LARGE_BODY_OCTETS:
            self.phase = SmtpPhase.BODY
            await self._write_slowly(dot_stuffed(content), conversation)
            await conversation.hear()
            if early := conversation.reply_at_hand():
                conversation.abort()
                return early
            conversation.check()
        else:
            body, owed = bytes(dot_stuffed(content)), 1
        if self._loop.time() >= self._latest:
            raise TimeoutError
        self._call.leaving()
        self.phase = SmtpPhase.FINAL
        conversation.write(body + b".\r\n", owed)
        reply = await self._final_reply(conversation)
        if conversation.contradicts(reply):
            raise OutOfStep
        return reply

    @staticmethod
    async def _final_reply(conversation: Conversation) -> SmtpReply:
        try:
            return await conversation.reply()
        except asyncio.CancelledError:
            # If the loop was busy, the reply may be in the socket when the deadline passes: look once more.
            await conversation.hear()
            if reply := conversation.reply_at_hand():
                return reply
            raise

    async def _write_slowly(self, body: Body, conversation: Conversation) -> None:
        """Writes a body as the system takes it; returns once it has, or the server has replied, or is gone."""
        conversation.write(b"", 1)
        for piece in body.pieces():
            if not conversation.is_listening:
                return
            conversation.write(piece, 0)
            await conversation.written()

    def _refusal(self, reply: SmtpReply, conversation: Conversation) -> Outcome:
        """What a no before the body means; not what the server says to an email that it has read."""
        if reply.blames_our_setup:
            raise ProviderFault(
                NAME,
                f"the SMTP server takes no email from us {self.phase} ({reply.codes}): it wants credentials or TLS.",
                remedy="Check DISPATCHER_SMTP_URL: user, password, and smtp:// or smtps://.",
            )
        return _judged(reply, self.phase, conversation)


class Dialogue:
    """Commands and their replies, one by one; sent all at once where the server has PIPELINING (RFC 2920)."""

    def __init__(
        self, conversation: Conversation, commands: list[bytes], pipelining: bool, patience: float | None
    ) -> None:
        """A dialogue that begins.

        Args:
            patience: Seconds that the first reply may take; None for as long as the deadline allows.
        """
        self._conversation = conversation
        self._unsent = deque(commands)
        self._left = len(commands)
        self._patience = patience
        if pipelining:
            self._unsent.clear()
            conversation.check()
            conversation.write(b"".join(commands), len(commands))

    async def next(self) -> SmtpReply:
        """The next command's reply.

        Raises:
            ConnectionBroke: there is no reply, or it cannot be this command's.
            ServerClosing: it is 421.
        """
        if self._unsent:
            self._conversation.check()
            self._conversation.write(self._unsent.popleft(), 1)
        self._left -= 1
        patience, self._patience = self._patience, None
        reply = await self._conversation.reply(patience)
        if reply.closes:
            raise ServerClosing(reply)
        if reply.code == START_INPUT and self._left:  # DATA comes last
            raise OutOfStep
        return reply

    async def reset_done(self) -> None:
        """Read the reply to RSET.

        Raises:
            ConnectionBroke: it is no yes, so what the server still remembers is unknown.
        """
        if not (await self.next()).is_positive:
            raise ConnectionBroke("the server refused RSET")

    async def back_out(self) -> None:
        """Send no more, and read what the server still owes; nothing of the email has left.

        A server that asks for the body although it took no recipient is left alone: RFC 2920, section 3.1, would have
        us send an empty email.
        """
        self._unsent.clear()
        last = None
        try:
            while self._conversation.owes:
                last = await self._conversation.reply()
        except ConnectionBroke:
            return
        if last is not None and last.code == START_INPUT:
            self._conversation.abort()


def _judged(reply: SmtpReply, phase: SmtpPhase, conversation: Conversation) -> Outcome:
    """The outcome of an unexpected reply. If it is no refusal, the server is out of step: aborts the connection."""
    if reply.code < 400:
        conversation.abort()
    return refusal(reply, phase)


def _unfit(email: RenderedEmail, connection: SmtpConnection) -> Rejected | None:
    """Why this server cannot take this email, whatever we say to it."""
    octets = len(email.body)
    if 0 < connection.size_limit < octets:
        return Rejected(Reason.TOO_LARGE, f"the server takes {connection.size_limit} octets, the email has {octets}")
    if email.needs_smtputf8 and not connection.has_smtputf8:
        words = "an address has letters before the @ that are not ASCII, and the server has no SMTPUTF8"
        return Rejected(_utf8_reason(email), words)
    return None


def _utf8_reason(email: RenderedEmail) -> Reason:
    if not email.sender.isascii():
        return Reason.REJECTED_SENDER
    if not all(recipient.isascii() for recipient in email.recipients):
        return Reason.REJECTED_RECIPIENT
    return Reason.INVALID_CONTENT


def _commands(email: RenderedEmail, connection: SmtpConnection) -> list[bytes]:
    mail = f"MAIL FROM:<{email.sender}>"
    if connection.has_size:
        mail += f" SIZE={len(email.body)}"
    if email.needs_smtputf8:
        # RFC 6531, section 3.6: the headers hold UTF-8, so the content counts as 8-bit.
        mail += " BODY=8BITMIME SMTPUTF8"
    reset = ["RSET"] if connection.needs_reset else []
    recipients = [f"RCPT TO:<{recipient}>" for recipient in email.recipients]
    return [f"{command}\r\n".encode() for command in (*reset, mail, *recipients, "DATA")]


def dot_stuffed(body: Body) -> Body:
    """The body with a dot before each line that begins with one (RFC 5321, section 4.5.2); Base64 has no dots."""
    return Body([_dot_stuffed(part) if isinstance(part, bytes) else part for part in body.parts])


def _dot_stuffed(octets: bytes) -> bytes:
    stuffed = octets.replace(b"\r\n.", b"\r\n..")
    return b"." + stuffed if stuffed.startswith(b".") else stuffed
