"""Whether a refusal counts against the provider or only against the email.

A refusal counts against the provider only together with refusals of other emails, to several domains, without a success
in between. If an email is refused again, and another email was tried and succeeded in between, the refusal counts
against that email alone.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from enum import Enum, auto
from typing import Final
from uuid import UUID

from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.values import dataclass, field

SEVERAL_DOMAINS: Final = 3
"""Refusals count against the provider only if the refused emails have at least this many domains."""
ALIKE_FACTOR: Final = 4
"""Four times as many refusals count against the provider even if all of them concern one domain, because the queue may
contain no emails to other domains."""
MAX_REMEMBERED: Final = 1024
"""How many refused emails a worker remembers per provider."""


class Blame(Enum):
    EMAIL = auto()
    """The email is the cause, and uses up an attempt."""
    PROVIDER = auto()
    """The provider is the cause, and must not be tried now. The email uses up no attempt."""
    UNKNOWN = auto()
    """The cause is unknown: no other email was refused or succeeded, or a single connection failed. The email waits,
    and uses up no attempt. Other emails do not wait."""


@dataclass(slots=True)
class Refusals:
    """The refusals since the provider's last success; a failed connection counts as one, too.

    `certain` of these `total` refusals cannot be an email's fault, because the provider had not yet seen one. A refusal
    that shows that the provider is reachable resets them.
    """

    total: int = 0
    certain: int = 0
    _witnesses: set[object] = field(default_factory=set)
    _email_ids: set[UUID] = field(default_factory=set)
    _domains: set[str] = field(default_factory=set)
    _senders: set[str] = field(default_factory=set)

    def add(self, email: OutgoingEmail | None, *, by_recipient: bool = False, times: int = 0) -> None:
        """Adds a refusal.

        If `by_recipient`, refusals of emails to the same recipients count once, and the provider is reachable. `times`
        is how often the email was refused, if each of its refusals counts.
        """
        self.total += 1
        if by_recipient or times:
            self.certain = 0
        if email is None:
            self.certain += 1
        elif len(self._email_ids) < MAX_REMEMBERED:
            self._witnesses.add((email.to, email.cc, email.bcc) if by_recipient else (email.email_id, times))
            self._email_ids.add(email.email_id)
            self._domains |= domains_of(email)
            self._senders.add(email.sender.lower())

    def are_enough(self, needed: int, *, by_sender: bool = False) -> bool:
        """Whether at least `needed` refusals count against the provider.

        If the refused emails go to fewer than SEVERAL_DOMAINS domains (`by_sender`: have fewer senders), ALIKE_FACTOR
        times as many are needed. But `needed` failed connections are always enough.
        """
        count = self.certain + len(self._witnesses)
        has_several = len(self._senders if by_sender else self._domains) >= min(needed, SEVERAL_DOMAINS)
        return self.certain >= needed or (count >= needed and has_several) or count >= needed * ALIKE_FACTOR

    def include(self, email: OutgoingEmail) -> bool:
        """Whether this email was refused, or each domain of its recipients is also a domain of a refused email."""
        return email.email_id in self._email_ids or (bool(self._domains) and domains_of(email) <= self._domains)

    def clear(self) -> None:
        self.total = self.certain = 0
        self._witnesses.clear()
        self._email_ids.clear()
        self._domains.clear()
        self._senders.clear()


class SuspectEmails:
    """Remembers refused emails, and whether other emails were tried after an email's first refusal, and succeeded."""

    def __init__(self) -> None:
        self._records: OrderedDict[UUID, tuple[int, int, float]] = OrderedDict()

    def note(
        self,
        email: OutgoingEmail,
        begun: int,
        succeeded: int,
        *,
        judged: int = 0,
        rejected_at: float = math.inf,
    ) -> bool | None:
        """Records a refusal. Returns whether an attempt that began after the email's first refusal has succeeded; None
        at the first. An attempt that began earlier shows nothing: the provider's quota may have been used up in
        between.

        `begun` and `succeeded` number the latest such attempts. Up to `judged`, the provider was at fault, so earlier
        refusals do not count. `rejected_at`: set for a rejection without a clear cause.
        """
        times, begun_before, rejected_since = self._records.pop(email.email_id, (0, begun, math.inf))
        if begun_before <= judged:
            begun_before, rejected_since = begun, math.inf
        self._records[email.email_id] = (times + 1, begun_before, min(rejected_since, rejected_at))
        if len(self._records) > MAX_REMEMBERED:
            self._records.popitem(last=False)
        return succeeded > begun_before if times else None

    def times(self, email: OutgoingEmail) -> int:
        return self._records[email.email_id][0] if email.email_id in self._records else 0

    def rejected_since(self, email: OutgoingEmail) -> float:
        """When the email was first rejected without a clear cause, after the last verdict against the provider; or
        infinite."""
        return self._records[email.email_id][2] if email.email_id in self._records else math.inf


def domains_of(email: OutgoingEmail) -> set[str]:
    addresses = (*email.to, *email.cc, *email.bcc)
    return {address.rpartition("@")[2].rstrip(">").lower() for address in addresses}
