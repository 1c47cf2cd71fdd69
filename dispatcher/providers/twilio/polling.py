"""Reads what became of an SMS from Twilio's messages: https://www.twilio.com/docs/messaging/api/message-resource

If Twilio's id of the SMS (the SID) is known, this module reads the message with this id. Otherwise it searches Twilio's
list of messages to the recipient's number. The module uses a message of the list only if no other message of the list
can be the SMS.
"""

from __future__ import annotations

import email.utils
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlencode
from uuid import UUID

from dispatcher.domain.event import ProviderEvent, Traits
from dispatcher.providers.contract import PollRefused
from dispatcher.providers.twilio.responses import code_of
from dispatcher.providers.twilio.statuses import SID, event_of
from dispatcher.transport.http_response import HttpResponse

PAGE_SIZE: Final = 50
"""The most messages that one request lists. If Twilio has more messages to the number, the list proves nothing."""

Message = Mapping[str, Any]


def path_of(message_id: str) -> str | None:
    """The path of a message under the account's URL; None if the id cannot be an id of Twilio."""
    return f"/Messages/{message_id}.json" if SID.fullmatch(message_id) else None


def list_path_of(traits: Traits) -> str:
    """The path of the list of messages to the recipient of an SMS, under the account's URL."""
    # The list begins with the start of a day in UTC, because Twilio selects messages by whole days.
    day = traits.accepted_from.astimezone(UTC).date().isoformat()
    return "/Messages.json?" + urlencode({"To": traits.recipient, "DateSent>": day, "PageSize": PAGE_SIZE})


def document_of(response: HttpResponse) -> Message | None:
    if response.status == 200:
        return response.document
    if response.status == 404:
        return None
    code = code_of(response)
    # The error does not quote the message of the response, because the message may contain a phone number.
    raise PollRefused(
        f"Twilio answers {code}.", retry_after=response.retry_after, is_about_all=400 <= response.status < 500
    )


def matching(document: Message, traits: Traits, default_sender: str) -> Message | None:
    """The only message of a list that can be the SMS; None if several can, or if the list is not complete."""
    listed = document.get("messages")
    if not isinstance(listed, list) or len(listed) >= PAGE_SIZE or document.get("next_page_uri"):
        return None
    sender = traits.sender or default_sender
    found = [each for each in listed if isinstance(each, dict) and _is_like(each, traits, sender)]
    if len(found) != 1 or not isinstance(sid := found[0].get("sid"), str) or sid in traits.other_ids:
        return None
    return found[0] if SID.fullmatch(sid) else None


def _is_like(message: Message, traits: Traits, sender: str) -> bool:
    try:
        created_at = email.utils.parsedate_to_datetime(str(message.get("date_created")))
    except ValueError:
        return False
    created_at = created_at if created_at.tzinfo else created_at.replace(tzinfo=UTC)
    field = "messaging_service_sid" if sender.startswith("MG") else "from"
    return (
        bool(sender)
        and message.get("to") == traits.recipient
        and message.get(field) == sender
        and message.get("body") == traits.text
        and traits.accepted_from <= created_at <= traits.accepted_until
    )


def event_in(message: Message, email_id: UUID) -> ProviderEvent | None:
    """The event that a status callback would report for the message's status; None if the status has no event."""
    code, detail = message.get("error_code"), message.get("error_message")
    return event_of(
        email_id,
        str(message.get("status")),
        datetime.now(UTC),
        sid=str(message.get("sid")),
        recipient=str(message.get("to")),
        code=str(code) if code else None,
        detail=detail if isinstance(detail, str) else None,
    )
