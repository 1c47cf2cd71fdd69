"""Renders an email for a server without SMTPUTF8, although some of its addresses need it."""

from __future__ import annotations

from dataclasses import replace

from dispatcher.domain.capabilities import has_ascii_local_part
from dispatcher.domain.outgoing import OutgoingEmail, without_recipients
from dispatcher.transport.mime import RenderedEmail, rendered


def is_sendable_in_ascii(email: OutgoingEmail) -> bool:
    """Whether the sender and at least one recipient need no SMTPUTF8."""
    return has_ascii_local_part(email.sender) and any(map(has_ascii_local_part, (*email.to, *email.cc, *email.bcc)))


async def rendered_in_ascii(email: OutgoingEmail) -> RenderedEmail:
    """Renders an email without the recipients and the Reply-To addresses that need SMTPUTF8."""
    everyone = (*email.to, *email.cc, *email.bcc)
    kept = [position for position, address in enumerate(everyone, 1) if has_ascii_local_part(address)]
    unsupported = frozenset(range(1, len(everyone) + 1)).difference(kept)
    to, cc, reply_to = (
        tuple(filter(has_ascii_local_part, listed))
        for listed in (*(email.shown or (email.to, email.cc)), email.reply_to)
    )
    content = await rendered(replace(without_recipients(email, unsupported), shown=(to, cc), reply_to=reply_to))
    positions = [content.positions_of(index) for index in range(len(content.recipients))]
    return replace(
        content,
        positions=tuple(tuple(kept[position - 1] for position in each) for each in positions),
        unsupported=unsupported,
        lacks_reply_to=reply_to != email.reply_to,
    )
