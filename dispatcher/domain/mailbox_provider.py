"""Groups recipients by the company that runs their mailboxes, for metrics."""

from __future__ import annotations

import re
from typing import Final

_COMPANIES: Final = (
    ("gmail", re.compile(r"g(oogle)?mail\.com")),
    ("microsoft", re.compile(r"(hotmail|live|msn|outlook)(\.com?)?\.[a-z]{2,3}")),
    ("yahoo", re.compile(r"yahoo(\.com?)?\.[a-z]{2,3}|(aol|rocketmail|ymail)\.com")),
    ("apple", re.compile(r"(icloud|mac|me)\.com")),
)


def mailbox_provider_of(address: str | None) -> str:
    """`gmail`, `microsoft`, `yahoo`, `apple` or `other`, by the lower-case address's domain; or `unknown`."""
    if not address:
        return "unknown"
    domain = address.rpartition("@")[2]
    return next((name for name, domains in _COMPANIES if domains.fullmatch(domain)), "other")
