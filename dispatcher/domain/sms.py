"""The SMS that an application enqueues, and how many segments its text takes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Final

from dispatcher.domain.email import Email
from dispatcher.domain.message import TextMessage
from dispatcher.domain.outgoing import EMAIL_CHANNEL
from dispatcher.domain.phone import is_likely, phone_number, sms_number
from dispatcher.errors import InvalidEmail

SMS_CHANNEL: Final = "sms"

_GSM_7: Final = frozenset(
    "@£$¥èéùìòÇ\nØø\rÅåΔ_ΦΓΛΩΠΨΣΘΞÆæßÉ !\"#¤%&'()*+,-./0123456789:;<=>?¡ABCDEFGHIJKLMNOPQRSTUVWXYZÄÖÑÜ§¿"
    "abcdefghijklmnopqrstuvwxyzäöñüà"
)
"""The alphabet of GSM 03.38 (3GPP TS 23.038, section 6.2.1). Each character takes one septet."""
_GSM_7_EXTENSION: Final = frozenset("^{}\\[~]|€\f")
"""The extension table of the alphabet of GSM 03.38. Each character takes two septets."""
_SENDER_NAME: Final = re.compile(r"(?=.*[A-Za-z])[A-Za-z0-9 &+_-]{1,11}", re.ASCII)
"""An alphanumeric sender: a name that the recipient's phone shows instead of a number."""
_SHORT_CODE: Final = re.compile(r"[0-9]{3,8}", re.ASCII)
_SENDER_POOL: Final = re.compile(r"[A-Z]{2}[0-9a-f]{32}", re.ASCII)
"""A provider's id of a group of senders, such as a Messaging Service of Twilio."""
FIRST_CHARACTERS: Final = 35
"""A text of at most this many characters always takes a single segment."""
_UNKNOWN_COUNTRY: Final = "is a number that no country is known to assign; check it, or update the package phonenumbers"
_NOT_ALLOWED: Final = "which DISPATCHER_SMS_COUNTRIES (default: the default senders' countries) does not allow"


class Alphabet(StrEnum):
    """How networks encode the text of an SMS."""

    GSM_7 = "GSM-7"
    """A single segment has 160 septets. If the text takes several segments, each has 153 septets."""
    UCS_2 = "UCS-2"
    """A single segment has 70 UTF-16 units. If the text takes several segments, each has 67. Used if any character is
    not in GSM-7."""


@dataclass(frozen=True, slots=True)
class Segments:
    """In how many segments networks transmit an SMS. Providers charge for each segment."""

    alphabet: Alphabet
    count: int


def segments_of(text: str) -> Segments:
    """How many segments a text takes. A character that takes two units is never split between two segments."""
    if _foreign(text) is None:
        return Segments(Alphabet.GSM_7, _packed((2 if each in _GSM_7_EXTENSION else 1 for each in text), 160, 153))
    return Segments(Alphabet.UCS_2, _packed((2 if ord(each) > 0xFFFF else 1 for each in text), 70, 67))


@dataclass(frozen=True, slots=True)
class SmsRules:
    """Which SMS the settings allow. `countries` are ISO 3166 codes; None for every country."""

    max_segments: int = 10
    countries: frozenset[str] | None = None

    def fault(self, to: str, text: str) -> InvalidEmail | None:
        """Why an SMS to this number, with this text, is not allowed; None if it is allowed."""
        try:
            _, country = sms_number("to", to)
        except InvalidEmail as error:
            return error
        if self.countries is not None and country not in self.countries:
            refused = f"is a number of {country}, {_NOT_ALLOWED}; add {country} on all hosts"
            return InvalidEmail("to", refused if country else _UNKNOWN_COUNTRY)
        found = segments_of(text) if len(text) > FIRST_CHARACTERS else None
        if found is None or found.count <= self.max_segments:
            return None
        words = f"takes {found.count} segments ({found.alphabet}); DISPATCHER_SMS_MAX_SEGMENTS allows"
        return InvalidEmail("text", f"{words} {self.max_segments}")


def _packed(widths: Iterable[int], alone: int, each: int) -> int:
    """How many segments characters of these widths take. A segment has `alone` units if the text fits into it, and
    otherwise `each`."""
    listed = list(widths)
    if sum(listed) <= alone:
        return 1
    count, room = 1, each
    for width in listed:
        if width > room:
            count, room = count + 1, each
        room -= width
    return count


def _foreign(text: str) -> str | None:
    return next((each for each in text if each not in _GSM_7 and each not in _GSM_7_EXTENSION), None)


class Sms(TextMessage):
    """An SMS to send. Immutable, and validated when it is created.

    Attributes:
        to: A tuple with one number in E.164, such as `+4915112345678`. The constructor removes spaces and punctuation.
        text: At most 1,600 characters.
        sender: A number in E.164, a short code, a name of up to 11 letters, digits and spaces, or the provider's id of
            a group of senders; empty: the provider's default sender.

    `Email` describes the other attributes.
    """

    __slots__ = ()
    channel: ClassVar[str] = SMS_CHANNEL

    @classmethod
    def checked_recipient(cls, value: str) -> str:
        """The recipient's number in E.164. Raises InvalidEmail, also if an SMS to this number may cost much more."""
        return sms_number("to", value)[0]

    @classmethod
    def checked_sender(cls, value: str) -> str:
        """The sender that the provider gets: a number in E.164, or the unchanged value if it is not a number. Raises
        InvalidEmail."""
        if value.startswith("+"):
            return phone_number("sender", value)
        if any(pattern.fullmatch(value) for pattern in (_SENDER_NAME, _SHORT_CODE, _SENDER_POOL)):
            return value
        raise InvalidEmail(
            "sender",
            "must be a number such as +4915112345678, a short code, a name of 1 to 11 letters, digits or spaces, or "
            "the provider's id of a group of senders",
        )

    @property
    def segments(self) -> Segments:
        return segments_of(self.text)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warns of an unlikely number, and of a character that increases the number of segments. See `Message`."""
        found = []
        if not is_likely(self.to[0]):
            found.append("to: No telephone company is known to assign this number; check the number.")
        count = self.segments.count
        if self.segments.alphabet is Alphabet.UCS_2 and (foreign := _foreign(self.text)) is not None:
            others = "".join(each for each in self.text if _foreign(each) is None)
            plain = others + "-" * (len(self.text) - len(others))
            if (without := segments_of(plain).count) < count:
                found.append(
                    f"text: U+{ord(foreign):04X} is not in GSM-7, so the text takes {count} segments instead of "
                    f"{without}."
                )
        return tuple(found)


def message_from_json(document: object, *, allowed_headers: Collection[str] = ()) -> Email | Sms:
    """Creates an SMS from a JSON object whose `channel` is `sms`, and an email from any other JSON object. Raises
    InvalidEmail."""
    channel = document.get("channel") if isinstance(document, dict) else None
    if channel == SMS_CHANNEL:
        return Sms.from_json(document)
    if channel not in (None, EMAIL_CHANNEL):
        raise InvalidEmail("channel", f"must be {EMAIL_CHANNEL} or {SMS_CHANNEL}")
    return Email.from_json(document, allowed_headers=allowed_headers)
