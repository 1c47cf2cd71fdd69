"""Sends one email on one SMTP connection (MAIL, RCPT, DATA, body), and derives the outcome from the replies.

The server can accept nothing before it has read the final dot (RFC 5321, section 4.1.1.4). A small body and its dot are
sent in one write, right after `mark_on_wire`. A large body is sent first, and the dot only when the kernel has accepted
the whole body. So a connection that breaks after half of ten megabytes is a definite failure.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from typing import Final

from dispatcher.domain.outcome import Concern, Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.transport.body import Body
from dispatcher.transport.call import Call
from dispatcher.transport.mime import RenderedEmail
from dispatcher.transport.smtp_connection import SmtpConnection
from dispatcher.transport.smtp_faults import setup_fault
from dispatcher.transport.smtp_protocol import (
    InvalidReply,
    ServerClosing,
    SmtpConnectionLost,
    SmtpProtocol,
    UnexpectedReply,
)
from dispatcher.transport.smtp_replies import SmtpPhase, SmtpReply, acceptance, no_recipient_left, refusal

START_INPUT: Final = 354
"""The code of the reply by which the server asks for the body."""
LARGE_BODY_OCTETS: Final = 64 * 1024
"""A body up to this size is sent together with its final dot, because a socket takes this many octets in one write."""
REUSED_REPLY_SECONDS: Final = 10.0
"""The time limit for the first reply on a reused connection; at most half of the remaining time. If no reply arrives in
this time, we open a new connection.
"""
REPLY_SHARE: Final = 0.25
"""The share of a transaction's time that is reserved for the last reply; at most MAX_REPLY_SECONDS."""
MAX_REPLY_SECONDS: Final = 5.0
"""The longest time that is reserved for the last reply, because servers scan an email before they reply. The final dot
is not sent within the reserved time."""


class SmtpTransaction:
    """One attempt to send one email. If a reused connection turns out to be dead, continues on a new connection."""

    def __init__(self, call: Call, envelope_sender: str | None = None) -> None:
        """`envelope_sender`: the address to which servers return bounces; None for the email's sender."""
        self._call = call
        self._envelope_sender = envelope_sender
        self._loop = asyncio.get_running_loop()
        self._send_dot_by = 0.0
        self.phase = SmtpPhase.WAITING  # how far the attempt has got
        # whether a command was refused with a protocol error, although it was sent alone
        self.has_protocol_error = False
        self.lacks_smtputf8 = False

    async def run(self, email: RenderedEmail, connection: SmtpConnection, *, reused: bool, pipelines: bool) -> Outcome:
        """Sends the email and returns the outcome. Then the protocol's `is_sound` reports whether it can be reused.

        `reused`: whether the connection was used for earlier emails, and so may be dead. `pipelines`: whether to send
        several commands in one write, if the server supports PIPELINING. Raises PipeliningBroken, with nothing sent;
        SmtpConnectionLost (call `outcome_without_reply`); or ProviderFault if the server refuses our credentials, TLS
        or name.
        """
        self.lacks_smtputf8 = email.needs_smtputf8 and not connection.has_smtputf8
        if unsupported := _unsupported(email, connection):
            return unsupported
        left = self._call.deadline - self._loop.time()
        self._send_dot_by = self._call.deadline - min(MAX_REPLY_SECONDS, max(0.0, left) * REPLY_SHARE)
        refused = await self._envelope(email, connection, reused=reused, pipelines=pipelines)
        if not isinstance(refused, list):
            connection.needs_reset = True
            return refused
        reply = await self._content(email.body, connection.protocol)
        connection.emails += 1
        if reply.is_positive and self.phase is SmtpPhase.FINAL:
            return _acceptance(reply, refused, email)
        connection.needs_reset = True
        return _outcome_of(reply, self.phase, connection.protocol)

    def outcome_without_reply(self, broke: SmtpConnectionLost | None) -> Deferred | Uncertain:
        """The outcome if no trusted reply arrived. `broke`: None if the connection is open, but the deadline passed."""
        detail = f"{broke or 'the deadline passed'} {self.phase}"
        if self.phase is SmtpPhase.FINAL:
            return Uncertain(detail)
        concern = Concern.PROVIDER if self.phase is SmtpPhase.CONNECTING else Concern.EITHER
        if broke is None:
            return Deferred(Reason.TIMEOUT_BEFORE_SEND, detail, known_concern=concern)
        if isinstance(broke, ServerClosing):
            judged = refusal(broke.reply, self.phase)
            assert isinstance(judged, Deferred)
            return judged
        reason = Reason.SERVER_ERROR if isinstance(broke, InvalidReply) else Reason.CONNECTION_FAILED
        return Deferred(reason, detail, known_concern=concern)

    async def _envelope(
        self, email: RenderedEmail, connection: SmtpConnection, *, reused: bool, pipelines: bool
    ) -> list[tuple[int, SmtpReply]] | Outcome:
        """Sends MAIL, RCPT and DATA. Returns the refused recipients' positions, from 1, and replies; or the outcome."""
        self.phase = SmtpPhase.MAIL
        timeout_seconds = min(REUSED_REPLY_SECONDS, (self._call.deadline - self._loop.time()) / 2) if reused else None
        commands = CommandSequence(
            connection.protocol,
            _commands(email, connection, self._envelope_sender or email.sender),
            pipelines and connection.has_pipelining,
            timeout_seconds,
        )
        if connection.needs_reset:
            await commands.read_reset_reply()
            connection.needs_reset = False
        mail = await commands.next()
        if not mail.is_positive:
            self.has_protocol_error = mail.is_protocol_error
            await commands.cancel()
            return self._refusal(mail, connection.protocol)
        self.phase = SmtpPhase.RCPT
        replies = [await commands.next() for _ in email.recipients]
        refused = [
            (position, reply)
            for index, reply in enumerate(replies)
            if not reply.is_positive
            for position in email.positions_of(index)
        ]
        self.has_protocol_error = bool(refused) and any(reply.is_protocol_error for reply in replies)
        if refused and not any(reply.is_positive for reply in replies):
            await commands.cancel()
            ours = next((reply for _, reply in refused if reply.blames_our_setup), None)
            return self._refusal(ours, connection.protocol) if ours else no_recipient_left(refused)
        self.phase = SmtpPhase.DATA
        data = await commands.next()
        if data.code == START_INPUT:
            return refused
        self.has_protocol_error |= data.is_protocol_error
        return self._refusal(data, connection.protocol)

    async def _content(self, content: Body, protocol: SmtpProtocol) -> SmtpReply:
        """Sends the body and the final dot, and returns the reply; an early reply, without the dot, to a large body."""
        # Raises SmtpConnectionLost also if a reply arrived before the first byte of the body, or if two replies after
        # the dot contradict each other.
        await protocol.read_available()
        protocol.check()
        body, owed = b"", 0
        if len(content) > LARGE_BODY_OCTETS:
            self.phase = SmtpPhase.BODY
            await self._write_slowly(dot_stuffed(content), protocol)
            await protocol.read_available()
            if early := protocol.received_reply():
                protocol.abort()
                return early
            protocol.check()
        else:
            body, owed = bytes(dot_stuffed(content)), 1
        if self._loop.time() >= self._send_dot_by:
            raise TimeoutError
        self._call.mark_on_wire()
        self.phase = SmtpPhase.FINAL
        protocol.write(body + b".\r\n", owed)
        reply = await self._final_reply(protocol)
        if protocol.contradicts(reply):
            raise UnexpectedReply
        return reply

    @staticmethod
    async def _final_reply(protocol: SmtpProtocol) -> SmtpReply:
        try:
            return await protocol.reply()
        except asyncio.CancelledError:
            # If the loop was busy, the reply may be unread in the socket when the deadline passes, so read once more.
            await protocol.read_available()
            if reply := protocol.received_reply():
                return reply
            raise

    async def _write_slowly(self, body: Body, protocol: SmtpProtocol) -> None:
        """Writes a body as fast as the kernel accepts it. Stops early if the server replies or closes."""
        protocol.write(b"", 1)
        for piece in body.pieces():
            if not protocol.awaits_reply:
                return
            protocol.write(piece, 0)
            await protocol.flush()

    def _refusal(self, reply: SmtpReply, protocol: SmtpProtocol) -> Outcome:
        """The outcome if MAIL, RCPT or DATA is refused. Raises ProviderFault if our setup is the cause."""
        if reply.blames_our_setup:
            what = "our name in EHLO" if reply.blames_our_name else "every email, and requires credentials or TLS,"
            raise setup_fault(f"refuses {what} {self.phase}", reply)
        return _outcome_of(reply, self.phase, protocol)


class PipeliningBroken(InvalidReply):
    """The server lost a command of a group, or refused one with a protocol error, or its replies are out of step."""

    def __init__(self) -> None:
        super().__init__("the server does not handle several commands in one write")


class CommandSequence:
    """Sends commands, all in one write if the server supports PIPELINING (RFC 2920), and returns their replies."""

    def __init__(
        self, protocol: SmtpProtocol, commands: list[bytes], pipelining: bool, timeout_seconds: float | None
    ) -> None:
        """Sends all commands now if `pipelining` is true. `timeout_seconds`: the limit for the first reply, if any."""
        self._protocol = protocol
        self._is_group = pipelining
        self._unsent = deque(commands)
        self._left = len(commands)
        self._timeout_seconds = timeout_seconds
        if pipelining:
            self._unsent.clear()
            protocol.check()
            protocol.write(b"".join(commands), len(commands))

    async def next(self) -> SmtpReply:
        """Returns the reply to the next command. Without PIPELINING, sends the command first.

        Raises PipeliningBroken if the server does not handle a group of commands, ServerClosing after a 421, and
        SmtpConnectionLost if the reply cannot belong to this command.
        """
        if self._unsent:
            self._protocol.check()
            self._protocol.write(self._unsent.popleft(), 1)
        self._left -= 1
        timeout_seconds, self._timeout_seconds = self._timeout_seconds, None
        reply = await self._protocol.reply(timeout_seconds)
        if reply.closes:
            raise ServerClosing(reply)
        # 354 asks for the body, so it can only reply to DATA, the last command.
        is_out_of_step = (reply.code == START_INPUT) is (self._left > 0) and reply.code < 400
        if self._is_group and (is_out_of_step or (reply.code >= 500 and reply.is_protocol_error)):
            raise PipeliningBroken
        if is_out_of_step and self._left:
            raise UnexpectedReply
        return reply

    async def read_reset_reply(self) -> None:
        """Reads the reply to RSET. Raises SmtpConnectionLost if it is a refusal: the server's state is then unknown."""
        if not (await self.next()).is_positive:
            raise SmtpConnectionLost("the server refused RSET")

    async def cancel(self) -> None:
        """Sends no further command, and reads the outstanding replies. No part of the email was sent.

        With PIPELINING, DATA was already sent. If the server asks for the body, although it refused the email, closes
        the connection. RFC 2920, section 3.1, recommends a final dot instead, but a dot would send an empty email.
        """
        self._unsent.clear()
        last = None
        try:
            while self._protocol.outstanding:
                last = await self._protocol.reply()
        except SmtpConnectionLost:
            return
        if last is not None and last.code == START_INPUT:
            self._protocol.abort()


def _acceptance(reply: SmtpReply, refused: list[tuple[int, SmtpReply]], email: RenderedEmail) -> Outcome:
    if not (refused or email.unsupported or email.lacks_reply_to):
        return acceptance(reply)
    positions = [position for index in range(len(email.recipients)) for position in email.positions_of(index)]
    outcome = acceptance(reply, refused, positions=positions, unsupported=email.unsupported)
    words = "; Reply-To was left out, because the server does not support SMTPUTF8" if email.lacks_reply_to else ""
    return replace(outcome, detail=f"{outcome.detail}{words}")


def _outcome_of(reply: SmtpReply, phase: SmtpPhase, protocol: SmtpProtocol) -> Outcome:
    """Closes the connection unless the reply is a refusal: then the replies do not match our commands."""
    if reply.code < 400:
        protocol.abort()
    return refusal(reply, phase)


def _unsupported(email: RenderedEmail, connection: SmtpConnection) -> Rejected | None:
    octets = len(email.body)
    if 0 < connection.size_limit < octets:
        words = f"the email has {octets} octets, and the server accepts at most {connection.size_limit}"
        return Rejected(Reason.TOO_LARGE, words)
    if email.needs_smtputf8 and not connection.has_smtputf8:
        words = "an address has non-ASCII letters before the @, and the server does not support SMTPUTF8"
        return Rejected(Reason.REJECTED_RECIPIENT if email.sender.isascii() else Reason.REJECTED_SENDER, words)
    if email.needs_8bit and not connection.has_8bitmime:
        # To encode the message would break its signatures.
        return Rejected(Reason.INVALID_CONTENT, "raw has octets beyond ASCII, and the server does not support 8BITMIME")
    return None


def _commands(email: RenderedEmail, connection: SmtpConnection, envelope_sender: str) -> list[bytes]:
    mail = f"MAIL FROM:<{envelope_sender}>"
    if connection.has_size:
        mail += f" SIZE={len(email.body)}"
    if email.needs_smtputf8:
        # RFC 6531, section 3.6: the headers contain UTF-8, so the content is 8-bit.
        mail += " BODY=8BITMIME SMTPUTF8"
    elif email.needs_8bit:
        mail += " BODY=8BITMIME"
    reset = ["RSET"] if connection.needs_reset else []
    recipients = [f"RCPT TO:<{recipient}>" for recipient in email.recipients]
    return [f"{command}\r\n".encode() for command in (*reset, mail, *recipients, "DATA")]


def dot_stuffed(body: Body) -> Body:
    """The body with a second dot before each dot that begins a line (RFC 5321, section 4.5.2). Base64 has no dots."""
    return Body([_dot_stuffed(part) if isinstance(part, bytes) else part for part in body.parts])


def _dot_stuffed(octets: bytes) -> bytes:
    stuffed = octets.replace(b"\r\n.", b"\r\n..")
    return b"." + stuffed if stuffed.startswith(b".") else stuffed
