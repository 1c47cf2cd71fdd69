"""Calendar objects in emails: invitations, updates, cancellations and replies (iMIP, RFC 6047)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from dispatcher.domain.text import body_fault
from dispatcher.errors import InvalidEmail

MAX_CALENDAR_OCTETS: Final = 1024 * 1024
MAX_DEPTH: Final = 10
"""Of components: a VALARM is at the third level. A path is kept for each level, so this also bounds the memory."""
METHODS: Final = ("PUBLISH", "REQUEST", "REPLY", "ADD", "CANCEL", "REFRESH", "COUNTER", "DECLINECOUNTER")
"""The methods of RFC 5546, section 1.4."""
CALENDAR_FILENAME: Final = "invite.ics"
_COMPONENTS: Final = ("VEVENT", "VTODO", "VJOURNAL", "VFREEBUSY")
_ATTENDED: Final = frozenset(METHODS) - {"PUBLISH", "CANCEL", "ADD", "DECLINECOUNTER"}
"""The methods that need an ATTENDEE, also in the opinion of Outlook (MS-OXCICAL)."""
_FOLD: Final = re.compile(r"\n[ \t]")
_PROPERTY: Final = re.compile(r'([A-Za-z0-9-]+)(?:;(?:[^":]|"[^"]*")*)?:(.*)')


@dataclass(frozen=True, slots=True)
class OutgoingCalendar:
    """A calendar object, as an adapter receives it.

    Attributes:
        content: The iCalendar text (RFC 5545), with CRLF line ends.
        method: Its METHOD, in upper case.
    """

    content: str = field(repr=False)
    method: str = ""


@dataclass(frozen=True, slots=True)
class Calendar(OutgoingCalendar):
    """A calendar object for an email: `Calendar("BEGIN:VCALENDAR…")`. Validated when it is created.

    The email shows it as an alternative to its text, so that mail programs offer buttons to accept or decline, and has
    it as the file `invite.ics`, too. By default, `method` is the METHOD in the content; otherwise both must agree.

    Raises:
        InvalidEmail: An argument is invalid.
    """

    def __post_init__(self) -> None:
        for name in ("content", "method"):
            if not isinstance(getattr(self, name), str):
                raise InvalidEmail(name, "must be a string")
        text = self.content.removeprefix("\ufeff").replace("\r\n", "\n").strip("\n") + "\n"
        if len(text.encode("utf-8", "replace")) > MAX_CALENDAR_OCTETS:
            raise InvalidEmail("content", f"is larger than {MAX_CALENDAR_OCTETS} bytes")
        if fault := body_fault(text) or ("contains a bare CR" if "\r" in text else None):
            raise InvalidEmail("content", fault)
        found = _method_in(_FOLD.sub("", text).strip("\n").split("\n"))
        if self.method and self.method.upper() != found:
            raise InvalidEmail("method", f"must be {found}, as METHOD in the content; they must agree (RFC 6047)")
        object.__setattr__(self, "content", text.replace("\n", "\r\n"))
        object.__setattr__(self, "method", found)


def _method_in(lines: list[str]) -> str:
    """The METHOD of the text. Raises InvalidEmail if RFC 5546 requires a property that is missing."""
    properties = _properties(lines)
    calendar = properties.get("VCALENDAR", {})
    method = calendar.get("METHOD", "").upper()
    if method not in METHODS:
        raise InvalidEmail("content", f"needs a line METHOD with one of: {', '.join(METHODS)}")
    if calendar.get("VERSION") != "2.0" or not calendar.get("PRODID"):
        raise InvalidEmail("content", "needs the lines VERSION:2.0 and PRODID")
    component = next((each for each in _COMPONENTS if f"VCALENDAR/{each}" in properties), None)
    if component is None:
        raise InvalidEmail("content", f"needs one of: {', '.join(_COMPONENTS)}")
    needed = ("UID", "DTSTAMP", "ORGANIZER", *(("ATTENDEE",) if method in _ATTENDED else ()))
    if missing := [each for each in needed if not properties[f"VCALENDAR/{component}"].get(each)]:
        raise InvalidEmail("content", f"has no {missing[0]} in {component}, which METHOD:{method} needs (RFC 5546)")
    return method


def _properties(lines: list[str]) -> dict[str, dict[str, str]]:
    """The properties of each component by its path, such as VCALENDAR/VEVENT; if there are several, of the last."""
    if [line.upper() for line in (lines[0], lines[-1])] != ["BEGIN:VCALENDAR", "END:VCALENDAR"]:
        raise InvalidEmail("content", "must be one iCalendar object: BEGIN:VCALENDAR … END:VCALENDAR")
    properties: dict[str, dict[str, str]] = {}
    inside: list[str] = []
    for line in lines:
        if (found := _PROPERTY.fullmatch(line)) is None:
            raise InvalidEmail("content", "has a line that is not a property of iCalendar, such as UID:1@example.com")
        name, value = found[1].upper(), found[2].strip()
        if not inside and properties:
            raise InvalidEmail("content", "must be one iCalendar object, and has something after it")
        if name == "BEGIN":
            inside.append(value.upper())
            if len(inside) > MAX_DEPTH:
                raise InvalidEmail("content", f"has components in components, more than {MAX_DEPTH} levels")
        elif name == "END":
            if not inside or inside.pop() != value.upper():
                raise InvalidEmail("content", "has an END without its BEGIN")
        else:
            properties.setdefault("/".join(inside), {})[name] = value
    return properties
