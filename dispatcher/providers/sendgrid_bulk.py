"""Several emails of one template in one `POST /v3/mail/send`: a personalization each, and one answer for all of them.

SendGrid's limits, from https://www.twilio.com/docs/sendgrid/api-reference/mail-send/limitations: 1,000
personalizations and 1,000 recipients in a request, and no address twice in it. What stands outside the personalizations
is common: sender, reply-to, template, categories. Message-ID, other headers, subject, data and the argument `email_id`
are each email's own.

A 202 accepts all; a 4xx refuses all, and names at best the personalization that it dislikes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final, NamedTuple
from uuid import UUID

import orjson

from dispatcher.domain.outcome import Outcome, Reason, Rejected
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.providers.contract import CallLimits, Part, RefusedTogether
from dispatcher.providers.sendgrid_answers import fields_of, outcome_of
from dispatcher.providers.sendgrid_mail import document_of, headers_of, personalizations_of
from dispatcher.transport.http import Answer
from dispatcher.transport.mime_headers import UnrenderableEmail, checked

LIMITS: Final = CallLimits(emails=1000, recipients=1000, octets=4 * 1024 * 1024)
"""SendGrid's; the octets are ours, so that one call does not keep the loop and the line for long."""

_NAMED: Final = re.compile(r"personalizations(?:\.|\[)(\d+)")
_COMMON: Final = re.compile(r"(?:template_id|reply_to|reply_to_list|categories)\b")


class Personalized(NamedTuple):
    """What an email adds to a call.

    Attributes:
        common: The request's fields outside the personalizations, as JSON with its braces.
        personalizations: As JSON; several where the email has nobody but bcc.
    """

    common: bytes
    personalizations: tuple[bytes, ...]


def part_of(email: OutgoingEmail, *, sandbox: bool) -> Part | None:
    """The email as part of a call; None where it has no template, has more than it, or cannot be rendered."""
    if email.template_id is None or email.attachments or email.text or email.html:
        return None
    try:
        common = _common(email.sender, email.reply_to, email.template_id, email.tags, sandbox)
        messages, addresses = personalizations_of(email)
        own = _own(email)
        personalizations = tuple([orjson.dumps(message | own) for message in messages])
    except (UnrenderableEmail, orjson.JSONEncodeError):
        return None
    return Part(
        key=common,
        recipients=len(addresses),
        octets=sum(map(len, personalizations)),
        content=Personalized(common, personalizations),
        addresses=frozenset(addresses),
    )


def body_of_call(parts: Sequence[Part]) -> bytes:
    """The request's body."""
    contents: list[Personalized] = [part.content for part in parts]
    people = b",".join(each for content in contents for each in content.personalizations)
    return b"".join((b'{"personalizations":[', people, b"],", contents[0].common[1:]))


def outcomes_of_call(answer: Answer, parts: Sequence[Part], *, sandbox: bool) -> list[Outcome] | RefusedTogether:
    """What an answer means for each of the emails.

    Raises:
        ProviderFault: see `outcome_of`.
    """
    outcome = outcome_of(answer, sandbox=sandbox)
    if not isinstance(outcome, Rejected):
        return [outcome] * len(parts)
    fields = fields_of(answer)
    if outcome.reason is Reason.REJECTED_SENDER or any(map(_COMMON.match, fields)):
        # Each of them alone would be refused alike.
        return [outcome] * len(parts)
    return RefusedTogether(_suspects(fields, parts))


@lru_cache(maxsize=256)
def _common(sender: str, reply_to: tuple[str, ...], template_id: str, tags: tuple[str, ...], sandbox: bool) -> bytes:
    pattern = OutgoingEmail(
        email_id=UUID(int=0),
        created_at=datetime.fromtimestamp(0, UTC),
        sender=sender,
        to=("nobody@example.org",),
        subject="",
        template_id=template_id,
        reply_to=reply_to,
        tags=tags,
    )
    document = document_of(pattern, sandbox=sandbox)
    del document["personalizations"], document["headers"]
    return orjson.dumps(document)


def _own(email: OutgoingEmail) -> dict[str, object]:
    """What stands in the request itself where the email travels alone."""
    own: dict[str, object] = {"headers": headers_of(email)}
    if email.subject:
        own["subject"] = checked("subject", email.subject)
    return own


def _suspects(fields: Collection[str], parts: Sequence[Part]) -> frozenset[int]:
    """The positions of the emails whose personalizations are named."""
    owners = [position for position, part in enumerate(parts) for _ in part.content.personalizations]
    named = [int(found[1]) for field in fields if (found := _NAMED.match(field))]
    return frozenset(owners[number] for number in named if number < len(owners))
