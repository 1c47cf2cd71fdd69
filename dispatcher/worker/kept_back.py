"""Keeps back emails to recipients whom this host must not reach, such as customers in a staging system.

Each attempt passes here, whatever enqueued the email: so one place decides for every door. A worker without
DISPATCHER_ALLOW_RECIPIENTS and DISPATCHER_REDIRECT_TO uses `SuppressedRecipients` itself, and never calls this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from dispatcher.config import Settings
from dispatcher.domain.outcome import Reason
from dispatcher.domain.outgoing import EMAIL_CHANNEL, TEST_CHANNEL, OutgoingEmail
from dispatcher.domain.values import replace
from dispatcher.store.address_hashes import normalised
from dispatcher.store.suppressions import SuppressionReader
from dispatcher.telemetry import metrics
from dispatcher.worker.outage import StoreOutage
from dispatcher.worker.suppression import SuppressedRecipients

ORIGINAL_RECIPIENTS: Final = "X-Dispatcher-Original-To"
"""Mail servers write X-Original-To, so no email may set that header."""
MAX_NAMED_OCTETS: Final = 800
"""The most octets of recipients in the header: SES takes 995 per header."""


def recipients_to_leave_out(settings: Settings, store: SuppressionReader, outage: StoreOutage) -> SuppressedRecipients:
    """Finds the recipients who get no email from this host."""
    if settings.allow_recipients is None and settings.redirect_to is None:
        return SuppressedRecipients(store, outage)
    return GuardedRecipients(settings, store, outage)


class GuardedRecipients(SuppressedRecipients):
    """As `SuppressedRecipients`, and leaves out everyone who is not allowed, even if suppression is ignored."""

    def __init__(self, settings: Settings, store: SuppressionReader, outage: StoreOutage) -> None:
        super().__init__(store, outage)
        allowed = tuple(map(normalised, settings.allow_recipients or ()))
        self._redirect_to = settings.redirect_to
        self._addresses = {each for each in allowed if "@" in each}
        self._domains = {each for each in allowed if "@" not in each and not each.startswith("+")}
        self._numbers = tuple(each for each in allowed if each.startswith("+") and "@" not in each)
        if settings.redirect_to:
            self._addresses.add(normalised(settings.redirect_to))

    def may_concern(self, email: OutgoingEmail, tenant_id: str, topic: str | None) -> bool:
        return super().may_concern(email, tenant_id, topic) or bool(self._foreign(email))

    async def find(self, email: OutgoingEmail, topic: str | None) -> Mapping[int, str]:
        foreign = dict.fromkeys(self._foreign(email), Reason.KEPT_BACK.value)
        metrics.SUPPRESSED_RECIPIENTS.add(len(foreign), Reason.KEPT_BACK.value)
        if len(foreign) == len((*email.to, *email.cc, *email.bcc)):
            return foreign
        return {**await super().find(email, topic), **foreign}

    def redirected(self, email: OutgoingEmail) -> OutgoingEmail:
        """The email to DISPATCHER_REDIRECT_TO alone, if a recipient is not allowed. An allowed recipient gets no copy
        of such an email, because the copy would name the others."""
        if self._redirect_to is None or email.channel != EMAIL_CHANNEL or not self._foreign(email):
            return email
        named = _named((*email.to, *email.cc, *email.bcc), lambda text: normalised(text).encode("ascii", "replace"))
        headers = {name: value for name, value in email.headers.items() if name.lower() != ORIGINAL_RECIPIENTS.lower()}
        return replace(
            email, to=(self._redirect_to,), cc=(), bcc=(), headers={**headers, ORIGINAL_RECIPIENTS: named}, shown=None
        )

    def _foreign(self, email: OutgoingEmail) -> list[int]:
        """The positions of the recipients who are not allowed. An email of a test key leaves no host."""
        if email.channel == TEST_CHANNEL:
            return []
        return [at for at, each in enumerate((*email.to, *email.cc, *email.bcc), 1) if not self._allows(each)]

    def _allows(self, recipient: str) -> bool:
        address = normalised(recipient)
        if "@" not in address:
            return bool(self._numbers) and address.startswith(self._numbers)
        return address in self._addresses or address.rpartition("@")[2] in self._domains


def _named(recipients: tuple[str, ...], ascii_of: Callable[[str], bytes]) -> str:
    """The recipients in one header of at most MAX_NAMED_OCTETS, and how many do not fit."""
    text = ""
    for number, each in enumerate(recipients):
        longer = f"{text}, {ascii_of(each).decode()}" if text else ascii_of(each).decode()
        if len(longer) > MAX_NAMED_OCTETS:
            return f"{text} and {len(recipients) - number} more"
        text = longer
    return text
