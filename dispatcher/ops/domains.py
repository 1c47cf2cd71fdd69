"""For operators: lists, sets and removes the ceilings of recipient domains.

All hosts apply a change within two seconds. Every change is audited.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dispatcher.domain.controls import DomainLimit
from dispatcher.domain.suppression import Recipient
from dispatcher.errors import DispatcherError, InvalidEmail
from dispatcher.ops.acts import Act
from dispatcher.store import domains as store
from dispatcher.store.comparable_address import comparable_domain
from dispatcher.store.connections import AsyncSession
from dispatcher.store.domains import LimitedDomain


class NoCeiling(DispatcherError):
    """The domain has no ceiling."""


def parse_domain(text: str) -> str:
    """The domain in lower case, and as A-labels (`xn--…`) if it is internationalized. The domains of recipients are
    compared in this form.

    Args:
        text: A domain, such as `example.org` or `@Example.org`.

    Raises:
        InvalidEmail: The text is not a domain.
    """
    if "@" in text.strip().removeprefix("@"):
        raise InvalidEmail("domain", "contains an @; write only the part after the @, such as example.org")
    return comparable_domain(Recipient.parse(f"@{text.strip().removeprefix('@')}").text)


async def list_domains(session: AsyncSession) -> list[LimitedDomain]:
    """The domains that have ceilings, sorted by name, each with the number of emails that wait for its ceilings."""
    return await store.count_domain_waits(session)


async def set_limit(session: AsyncSession, domain: str, values: Mapping[str, Any], act: Act) -> DomainLimit:
    """Sets the given ceilings of a domain, and returns all its ceilings.

    Args:
        values: The new ceilings `per_second` and `concurrent`. For each, None keeps the present ceiling.
    """
    return await store.set_limit(session, domain, values, asdict(act))


async def remove_limit(session: AsyncSession, domain: str, act: Act) -> None:
    """Deletes the ceilings of a domain. The emails that wait for these ceilings become due.

    Raises:
        NoCeiling: The domain has no ceiling.
    """
    if not await store.remove_limit(session, domain, asdict(act)):
        raise NoCeiling(f"{domain} has no ceiling.", remedy="See `dispatcher domains list`.")
