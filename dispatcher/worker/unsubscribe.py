"""Adds the headers with which recipients can unsubscribe by one click in a mail program (RFC 8058)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from dispatcher.domain.capabilities import recipients_of
from dispatcher.domain.outgoing import EMAIL_CHANNEL, OutgoingEmail
from dispatcher.store.address_hashes import AddressHasher, normalised

LIST_UNSUBSCRIBE: Final = "List-Unsubscribe"
ONE_CLICK: Final = {"List-Unsubscribe-Post": "List-Unsubscribe=One-Click"}


class UnsubscribeHeaders:
    """Adds the List-Unsubscribe headers to emails from the configured senders."""

    def __init__(self, url: str, senders: Collection[str]) -> None:
        self._prefix = f"{url.rstrip('/')}/v1/unsubscribe/"
        self._senders = frozenset(normalised(sender) for sender in senders)

    def added_to(self, email: OutgoingEmail, hasher: AddressHasher) -> OutgoingEmail:
        """The email with the headers. Unchanged if its sender is not one of `senders`, it has or had several
        recipients, the application has set a List-Unsubscribe header, or it is an SMS."""
        if email.channel != EMAIL_CHANNEL or email.shown is not None:
            return email
        sender = normalised(email.sender)
        if sender not in self._senders and sender.rpartition("@")[2] not in self._senders:
            return email
        if recipients_of(email) != 1 or any(name.lower() == LIST_UNSUBSCRIBE.lower() for name in email.headers):
            return email
        (address,) = (*email.to, *email.cc, *email.bcc)
        url = self._prefix + hasher.unsubscribe_token(email.email_id, address)
        return replace(email, headers={**email.headers, LIST_UNSUBSCRIBE: f"<{url}>", **ONE_CLICK})
