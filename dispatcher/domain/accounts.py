"""Several accounts of one provider: `smtp:billing` is the account `billing` of the provider `smtp`.

An account has its own settings, circuit breaker, ceilings, pauses and name in records and metrics: routing treats it as
a provider. Rules choose the accounts of an email.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache
from typing import Final, NamedTuple

from dispatcher.domain.lanes import LANE
from dispatcher.domain.values import dataclass

SEPARATOR: Final = ":"
ACCOUNT: Final = re.compile(r"[a-z][a-z0-9_]*")
MAX_NAME_OCTETS: Final = 24
"""The longest name of a provider with its account: the in-flight ledger has room for so many octets."""
_DOMAIN: Final = re.compile(r"[^\s@,;=<>]{1,253}")


def provider_of(name: str) -> str:
    """`smtp` for `smtp:billing` and for `smtp`."""
    return name.partition(SEPARATOR)[0]


def account_of(name: str) -> str:
    """`billing` for `smtp:billing`; empty for `smtp`."""
    return name.partition(SEPARATOR)[2]


class AccountRule(NamedTuple):
    """Emails with this tenant, sender and lane use these accounts. A condition that is None applies to all emails."""

    accounts: tuple[str, ...]
    tenant: str | None = None
    sender: str | None = None  # an address or a domain, in lower case
    lane: str | None = None

    def applies(self, tenant: str | None, sender: str | None, lane: str | None) -> bool | None:
        """Whether the rule applies to an email; None if this depends on an argument that is None, which is not known
        yet."""
        senders = None if sender is None else senders_of(sender)
        wanted = ((self.tenant, tenant and (tenant,)), (self.sender, senders), (self.lane, lane and (lane,)))
        known = [found and value in found for value, found in wanted if value is not None]
        return False if False in known else None if None in known else True


@dataclass(frozen=True, slots=True)
class AccountRules:
    """The rules of a host, in order: the first one that applies decides. An email to which none applies uses the
    accounts that no rule names."""

    rules: tuple[AccountRule, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rules)

    def __str__(self) -> str:
        return "; ".join(map(_written, self.rules))

    @property
    def named(self) -> frozenset[str]:
        return frozenset(name for rule in self.rules for name in rule.accounts)

    def allowed(
        self, names: Collection[str], *, tenant: str | None, sender: str | None, lane: str | None
    ) -> Collection[str]:
        """Which of these providers an email may use. If its tenant, sender or lane is None, which means that it is not
        known: all that such an email may use."""
        found: set[str] = set()
        for rule in self.rules:
            applies = rule.applies(tenant, sender, lane)
            if applies is not False:
                found.update(rule.accounts)
            if applies:
                break
        else:
            found.update(frozenset(names) - self.named)
        return [name for name in names if name in found]


@lru_cache(maxsize=256)
def senders_of(sender: str) -> tuple[str, str]:
    """The sender's address and domain, as rules have them."""
    from dispatcher.domain.address import ascii_host  # loaded late, because few commands need it

    local, _, domain = sender[sender.rfind("<") + 1 :].rstrip("> ").lower().rpartition("@")
    domain = ascii_host(domain)
    return f"{local}@{domain}", domain


def parse_rules(text: str) -> AccountRules:
    """Parses rules such as `tenant=acme -> sendgrid:acme; sender=billing.example lane=bulk -> smtp:billing,smtp`.

    Raises ValueError. The message follows the setting's name.
    """
    return AccountRules(
        tuple(_rule(part.strip(), number) for number, part in enumerate(filter(str.strip, text.split(";")), 1))
    )


def _rule(text: str, number: int) -> AccountRule:
    conditions, arrow, names = text.partition("->")
    accounts = tuple(name.strip().lower() for name in names.split(",") if name.strip())
    found: dict[str, str] = {}
    for each in conditions.split():
        field, _, value = each.partition("=")
        if field in found or not _is_valid(field, value):
            raise ValueError(
                f"has a condition in rule {number} that is not tenant=TENANT, sender=ADDRESS_OR_DOMAIN or lane=LANE, "
                "each at most once"
            )
        found[field] = senders_of(value)["@" not in value] if field == "sender" else value
    if not arrow or not found or not accounts:
        raise ValueError(f"must have rules such as `tenant=acme -> sendgrid:acme`, separated by `;`; see rule {number}")
    return AccountRule(accounts, **found)


def _is_valid(field: str, value: str) -> bool:
    from dispatcher.domain.text import MAX_TENANT_CHARACTERS, TENANT_PATTERN

    if field == "tenant":
        return len(value) <= MAX_TENANT_CHARACTERS and re.fullmatch(TENANT_PATTERN, value) is not None
    if field == "lane":
        return LANE.fullmatch(value) is not None
    local, _, domain = value.rpartition("@")
    return field == "sender" and _DOMAIN.fullmatch(domain) is not None and (bool(local) or "@" not in value)


def _written(rule: AccountRule) -> str:
    conditions = (("tenant", rule.tenant), ("sender", rule.sender), ("lane", rule.lane))
    return f"{' '.join(f'{field}={value}' for field, value in conditions if value)} -> {','.join(rule.accounts)}"
