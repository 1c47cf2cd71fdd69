"""What counts against a provider, and against single emails.

A refusal may be about the provider or about the email that got it. Only refusals of several emails, to recipients of
several domains, with no success between them, count against the provider. If an email is refused again after others
got through, that counts against this email alone.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final
from uuid import UUID

from dispatcher.domain.outgoing import OutgoingEmail

SEVERAL_DOMAINS: Final = 3
"""Refused emails to fewer domains are first of all a fault of these domains."""
ALIKE_FACTOR: Final = 4
"""So many times as many refusals count although they are all of one domain: perhaps there is no other in the queue."""
MOST_REMEMBERED: Final = 1024
"""Emails and domains that a worker remembers per provider; the oldest is forgotten first."""


class Blame(Enum):
    """What a refusal is blamed on."""

    EMAIL = auto()
    """The email: its attempt counts."""
    PROVIDER = auto()
    """The provider, which may not be tried now: no attempt is burnt."""
    UNKNOWN = auto()
    """No other email was refused, and none got through: no attempt is burnt, and the email alone waits."""


@dataclass(slots=True)
class Refusals:
    """The refusals since a provider last worked.

    Attributes:
        total: How many, whether they count or not.
        certain: Those before the provider saw any email, such as a connection that failed.
    """

    total: int = 0
    certain: int = 0
    _witnesses: set[object] = field(default_factory=set)
    _email_ids: set[UUID] = field(default_factory=set)
    _domains: set[str] = field(default_factory=set)

    def add(self, email: OutgoingEmail | None, *, by_recipient: bool = False) -> None:
        """Notes a refusal.

        Args:
            email: What was refused; None if the provider had not seen it.
            by_recipient: Several emails to the same recipients count once. The provider saw them, so it can be reached
                again.
        """
        self.total += 1
        if by_recipient:
            self.certain = 0
        if email is None:
            self.certain += 1
        elif len(self._email_ids) < MOST_REMEMBERED:
            self._witnesses.add((email.to, email.cc, email.bcc) if by_recipient else email.email_id)
            self._email_ids.add(email.email_id)
            self._domains |= domains_of(email)

    def are_enough(self, needed: int) -> bool:
        """Whether so many count against the provider, given the emails and domains that they come from."""
        count = self.certain + len(self._witnesses)
        has_several = len(self._domains) >= min(needed, SEVERAL_DOMAINS)
        return self.certain >= needed or (count >= needed and has_several) or count >= needed * ALIKE_FACTOR

    def include(self, email: OutgoingEmail) -> bool:
        """Whether this email was refused, or others to each of its domains were."""
        return email.email_id in self._email_ids or (bool(self._domains) and domains_of(email) <= self._domains)

    def clear(self) -> None:
        """Forgets them: the provider works."""
        self.total = self.certain = 0
        self._witnesses.clear()
        self._email_ids.clear()
        self._domains.clear()


class Suspects:
    """The emails whose refusal alone stopped a provider, or would have."""

    def __init__(self) -> None:
        self._records: OrderedDict[UUID, tuple[int, int]] = OrderedDict()

    def note(self, email: OutgoingEmail, successes: int) -> bool | None:
        """Notes a refusal; returns whether others got through since the email's first one, None if it is the first.

        Args:
            successes: How many emails the provider has ever answered.
        """
        times, successes_before = self._records.pop(email.email_id, (0, successes))
        self._records[email.email_id] = (times + 1, successes_before)
        if len(self._records) > MOST_REMEMBERED:
            self._records.popitem(last=False)
        return successes > successes_before if times else None

    def times(self, email: OutgoingEmail) -> int:
        """How many refusals of the email were noted."""
        return self._records.get(email.email_id, (0, 0))[0]


def domains_of(email: OutgoingEmail) -> set[str]:
    """The domains of its recipients."""
    addresses = (*email.to, *email.cc, *email.bcc)
    return {address.rpartition("@")[2].rstrip(">").lower() for address in addresses}
