"""The navigation of the operators' page: its entries, and which entries a visitor sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.config import Settings
from dispatcher.providers.capture import NAME as CAPTURE
from dispatcher.providers.sms_capture import NAME as SMS_CAPTURE


@dataclass(frozen=True, slots=True)
class Entry:
    """A link of the navigation.

    Attributes:
        path: The path of the link's target, below `site.path`.
        is_current: Whether the visitor is on this page, or on a page below it.
    """

    path: str
    label: str
    is_current: bool = False


# For each entry: the path, the label, and whether only visitors who see all tenants may see the page.
_ENTRIES: Final = (
    ("/", "Overview", False),
    ("/emails", "Emails", False),
    ("/dead-letters", "Dead letters", False),
    ("/held", "Held", False),
    ("/poison", "Poison", True),
    ("/replays", "Replays", False),
    ("/suppressions", "Suppressions", False),
    ("/events", "Events", False),
    ("/webhooks", "Webhooks", False),
    ("/lanes", "Lanes and tenants", True),
    ("/domains", "Domains", True),
    ("/pauses", "Pauses", False),
    ("/keys", "Keys", True),
    ("/audit", "Audit", True),
)


def entries(settings: Settings, visitor: Visitor | None, path: str) -> list[Entry]:
    """The entries that a visitor may see.

    Args:
        path: The page that the visitor is on.
    """
    if visitor is None:
        return []
    listed = [(own, label) for own, label, for_all in _ENTRIES if not for_all or visitor.tenant_id is None]
    if {CAPTURE, SMS_CAPTURE} & set(settings.providers) and visitor.tenant_id is None and visitor.may_act:
        listed.append(("/captured", "Try it"))
    return [Entry(own, label, path == own or (own != "/" and path.startswith(f"{own}/"))) for own, label in listed]
